"""What a switch costs, and how that varies: phase by phase from switch to switch, and between the ranks of one (SPEC §5.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from talaria.profiles.numbers import HardwareNumbers
from talaria.sim.noise import Factors, factors

Phases = tuple[float, float, float, float, float]
Streams = Callable[[str], np.random.Generator]


class SwitchCost(NamedTuple):
    """A planned switch in seconds of ground truth before variation; bytes are per rank."""

    path: str
    drain_s: float
    """Outstanding checkpoints of the source, and in-flight KV that is swapped out."""
    fixed_s: tuple[float, float, float, float]
    """Phases 1, 3, 4 and 5."""
    gather_s: float
    """Staged weights, device to device."""
    load_s: float
    """The rest from the host; a full open takes all its time here."""
    coverage: float
    dirty: float
    d2d_bytes: int
    h2d_bytes: int


class SwitchVariation:
    """Seeded factors of every part of a switch; ``vary=False`` makes all of them one.

    The fixed phases of a profile and its D2D bandwidth are medians, its H2D bandwidth is a mean. Ranks move the same bytes by the
    same path: what sets them apart is a factor on their copies.
    """

    def __init__(self, hardware: HardwareNumbers, streams: Streams, *, vary: bool = True) -> None:
        def of(purpose: str, cv: float, ranks: int = 1, *, median_one: bool = False) -> Factors:
            return factors(streams(purpose), cv if vary else 0.0, ranks, median_one=median_one)

        self._load = of("switch", hardware.switch_cv)
        self._gather = of("gather", hardware.gather_cv, median_one=True)
        self._fixed = (
            of("phase 1", hardware.save_phase_cv, median_one=True),
            of("phase 3", hardware.shell_phase_cv, median_one=True),
            of("phase 4", hardware.backend_phase_cv, median_one=True),
            of("phase 5", hardware.publish_phase_cv, median_one=True),
        )
        self._slowest_rank = of("ranks", hardware.rank_spread_cv, hardware.tp)
        self._rank = of("rank", hardware.rank_spread_cv)

    def slowest_s(self, cost: SwitchCost) -> Phases:
        """The five phases of the next switch, on its slowest rank."""
        return self._phases_s(cost, (self._slowest_rank(),))[0]

    def ranks_s(self, cost: SwitchCost, ranks: int) -> list[Phases]:
        """The five phases of the next switch on each of its ranks."""
        return self._phases_s(cost, [self._rank() for _ in range(ranks)])

    def _phases_s(self, cost: SwitchCost, rank_factors: Sequence[float]) -> list[Phases]:
        save_s, shell_s, backend_s, publish_s = (factor() * part_s for factor, part_s in zip(self._fixed, cost.fixed_s, strict=True))
        copied_s = cost.gather_s * self._gather() + cost.load_s * self._load()
        return [(save_s + cost.drain_s, copied_s * factor, shell_s, backend_s, publish_s) for factor in rank_factors]
