"""The calls and sessions of two runs of one trace, side by side: joined by session, line and turn, medians over repetitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from talaria.report.measured import COMPLETED, session_times
from talaria.report.record import NO_INSTANCE, RunRecord

Key = TypeVar("Key")


class CallKey(NamedTuple):
    """``line`` counts a session's lines in the order of the trace, as ``calls.parquet`` does."""

    session: str
    line: int
    turn: int


class CallTimes(NamedTuple):
    """Seconds from the call's enqueue, medians over the repetitions in which it completed."""

    placed_s: float
    admitted_s: float
    ttft_s: float
    e2e_s: float


class Side(NamedTuple):
    """One run: its calls and sessions by key. A session that did not complete in every repetition is left out."""

    calls: dict[CallKey, CallTimes]
    sct_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Errors:
    """Simulated less measured, in seconds, over what both runs have."""

    count: int
    unmatched: int
    """In one of the runs only."""
    bias_s: float
    mae_s: float
    """Mean absolute error."""
    p95_s: float
    """95th percentile of the absolute error."""
    mae_share: float
    """``mae_s`` over the measured mean."""


def side(records: Sequence[RunRecord]) -> Side:
    """The calls and sessions of one run, whose records are its repetitions."""
    calls: dict[CallKey, list[CallTimes]] = {}
    scts_s: dict[str, list[float]] = {}
    for record in records:
        for key, times in completed_calls(record):
            calls.setdefault(key, []).append(times)
        names, sessions = session_names(record), session_times(record)
        for number in np.flatnonzero(~sessions.is_child & ~np.isnan(sessions.sct_s)).tolist():
            scts_s.setdefault(names[number], []).append(float(sessions.sct_s[number]))
    medians = {key: CallTimes(*(median(values) for values in zip(*times, strict=True))) for key, times in calls.items()}
    return Side(medians, {name: median(values) for name, values in scts_s.items() if np.isfinite(values).all()})


def completed_calls(record: RunRecord) -> Iterable[tuple[CallKey, CallTimes]]:
    """Key and times of every call that completed."""
    names, calls = session_names(record), record.calls
    kept = (calls["outcome"] == COMPLETED) & (calls["instance"] != NO_INSTANCE)
    columns = [calls[name][kept].tolist() for name in ("session", "line", "turn", "placed_s", "admitted_s", "ttft_s", "e2e_s")]
    for session, line, turn, *times in zip(*columns, strict=True):
        yield CallKey(names[session], line, turn), CallTimes(*times)


def session_names(record: RunRecord) -> Sequence[str]:
    """By number; numbers themselves where a run kept no names."""
    if record.session_names is not None:
        return record.session_names
    return [str(number) for number in range(int(record.calls["session"].max(initial=-1)) + 1)]


def errors(simulated: dict[Key, float], measured: dict[Key, float]) -> Errors:
    """Over the keys that both have."""
    shared = [key for key in measured if key in simulated]
    unmatched = len(simulated) + len(measured) - 2 * len(shared)
    if not shared:
        return Errors(0, unmatched, 0.0, 0.0, 0.0, 0.0)
    true_s = np.array([measured[key] for key in shared])
    off_s = np.array([simulated[key] for key in shared]) - true_s
    sizes = np.abs(off_s)
    p95_s = float(np.sort(sizes)[int(np.ceil(0.95 * len(sizes))) - 1])
    mae_s = float(sizes.mean())
    return Errors(len(shared), unmatched, float(off_s.mean()), mae_s, p95_s, mae_s / max(float(true_s.mean()), 1e-9))
