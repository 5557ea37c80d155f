"""What kind of work a trace is: the regime table of SPEC §1 for any workload, in one pass over its sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(sorted_values: Sequence[float], percent: float) -> float:
    """The observation at rank ceil(percent·N/100) of an ascending sample: the project's only percentile (SPEC §1).

    ``percent`` in (0, 100]. Raises ValueError for an empty sample or a percentage outside.
    """
    if not 0.0 < percent <= 100.0:
        raise ValueError(f"percent = {percent}, allowed: above 0, at most 100")
    if len(sorted_values) == 0:
        raise ValueError("percentile of an empty sample")
    # Products like 99.9·1000/100 land a rounding error above the whole rank they stand for.
    rank = math.ceil(percent * len(sorted_values) / 100.0 - 1e-9)
    return sorted_values[rank - 1]
