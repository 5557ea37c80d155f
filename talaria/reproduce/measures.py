"""What a job keeps: a run's metrics and its switches by path and phase, the component run's switches by rank, a draw's regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from talaria.report.measured import Array
from talaria.report.metrics import metrics
from talaria.report.record import PATHS, RunRecord
from talaria.substrate.switch import SwitchRecord
from talaria.workload.session import Workload
from talaria.workload.stats import nearest_rank, regime

Values = dict[str, float | None]

PHASE_COLUMNS = ("p1", "p2", "p3", "p4", "p5", "total")
LONG_GAP_S = 30.0
"""Beyond this the source left gaps out of its percentiles."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn workload: calls a session, seconds of every gap, tokens of every prompt; each ascending."""

    depths: Array
    gaps_s: Array
    prompt_tokens: Array


def of_run(record: RunRecord) -> Values:
    """Every metric by name, and ``{path}_{phase}_{percentile}_s`` of the logical switches: seconds of the slowest rank."""
    return {**metrics(record), **_switch_phases(record)}


def _switch_phases(record: RunRecord) -> Values:
    values: Values = {}
    taken = record.switches["path"]
    for column in PHASE_COLUMNS:
        seconds = record.switches[f"{column}_s"]
        for path in ("d2d", "partial", "h2d"):
            kept = np.sort(seconds[taken == PATHS.index(path)]).tolist()
            for percent in (50, 95):
                values[f"{path}_{column}_p{percent}_s"] = nearest_rank(kept, percent) if kept else None
    return values


def of_components(records: Mapping[str, Sequence[SwitchRecord]]) -> Values:
    """``{path}_{phase}_{percentile}_s`` over all ranks of all switches by that path."""
    values: Values = {}
    for path, ranks in records.items():
        for place, column in enumerate(PHASE_COLUMNS):
            seconds = sorted([(*record.phases_s, record.total_s)[place] for record in ranks])
            for percent in (50, 95):
                values[f"{path}_{column}_p{percent}_s"] = nearest_rank(seconds, percent)
    return values


def of_draw(workload: Workload) -> tuple[Values, Draw]:
    """The regime of ``workload``: gaps beyond 30 s are counted, and left out of the gap percentiles as in the source."""
    sessions = list(workload.sessions())
    gaps = np.sort([call.gap_s for session in sessions for call in session.calls if call.waits_for])
    draw = Draw(
        depths=np.sort([len(session.calls) for session in sessions]),
        gaps_s=gaps,
        prompt_tokens=np.sort([call.prompt_tokens for session in sessions for call in session.calls]),
    )
    table = regime(workload)
    short = gaps[gaps <= LONG_GAP_S].tolist()
    values: Values = {
        "sessions": float(table["sessions"]),
        "calls": float(table["calls"]),
        **{f"depth_{name}": float(table["depth"][name]) for name in ("p50", "p95", "max")},
        **{f"prompt_{name}_tokens": float(table["prompt_tokens"][name]) for name in ("p50", "p95")},
        **{f"gap_p{percent}_s": nearest_rank(short, percent) for percent in (50, 95)},
        "gaps_over_30_s": float(len(gaps) - len(short)),
        "gaps_from_10_s": float(np.count_nonzero(gaps >= 10.0)),
        "reusing_over_half": table["reusing_over_half"],
    }
    return values, draw
