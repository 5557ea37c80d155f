"""The measured window of one run as arrays, computed once and read by every metric.

Warm-up calls are left out everywhere (SPEC §6), and with them every session that they belong to and every round and
switch that began before the first measured call was enqueued. The record's own counters (leases, misses, risk) are
the host's, which starts them with the measured window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from talaria.report.record import FLAG_RETURN, FLAG_WARMUP, OUTCOMES, RunRecord

Array = np.ndarray[Any, Any]

COMPLETED, SHED, FAILED = (OUTCOMES.index(name) for name in ("completed", "shed", "failed"))


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Session completion times by session number, in seconds: children are part of their parent's (SPEC §6).

    ``sct_s`` is infinite where a call of the session or of one of its children was shed or failed, and NaN where the
    session has no measured call or reaches into the warm-up. ``is_child`` marks subagent sessions, which have an SCT
    of their own but are not one of the user's tasks.
    """

    sct_s: Array
    is_child: Array

    @property
    def tasks(self) -> Array:
        """SCT of every measured top-level session, infinite where it did not complete."""
        return self.sct_s[~self.is_child & ~np.isnan(self.sct_s)]

    @property
    def completed(self) -> Array:
        """SCT of every top-level session whose calls all completed, in no particular order."""
        tasks = self.tasks
        return tasks[np.isfinite(tasks)]


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows of the measured window. Arrays named after columns hold one element per measured call."""

    record: RunRecord
    flags: Array
    outcome: Array
    ttft_s: Array
    e2e_s: Array
    output_tokens: Array
    kv_state: Array
    rounds_waited: Array
    completed: Array
    """Boolean per call."""
    returns: Array
    """Boolean per call: continuations that were placed on an instance."""
    sessions: SessionTimes
    round_wall_s: Array
    round_active_s: Array
    round_switch_s: Array
    round_sp_admitted: Array
    round_parked: Array
    switch_path: Array
    switch_total_s: Array


def measured(record: RunRecord) -> Measured:
    """The arrays of ``record`` that metrics read, without its warm-up."""
    calls, rounds, switches = record.calls, record.rounds, record.switches
    flags, outcome = calls["flags"], calls["outcome"]
    inside = (flags & FLAG_WARMUP) == 0
    began_s = window_began_s(record)
    in_round, in_switch = rounds["started_s"] >= began_s, switches["started_s"] >= began_s
    flags, outcome = flags[inside], outcome[inside]
    return Measured(
        record=record,
        flags=flags,
        outcome=outcome,
        ttft_s=calls["ttft_s"][inside],
        e2e_s=calls["e2e_s"][inside],
        output_tokens=calls["output_tokens"][inside],
        kv_state=calls["kv_state"][inside],
        rounds_waited=calls["rounds_waited"][inside],
        completed=outcome == COMPLETED,
        returns=((flags & FLAG_RETURN) != 0) & (outcome != SHED),
        sessions=session_times(record),
        round_wall_s=rounds["wall_s"][in_round],
        round_active_s=rounds["active_s"][in_round],
        round_switch_s=rounds["switch_s"][in_round],
        round_sp_admitted=rounds["sp_admitted"][in_round],
        round_parked=rounds["parked"][in_round],
        switch_path=switches["path"][in_switch],
        switch_total_s=switches["total_s"][in_switch],
    )


def window_began_s(record: RunRecord) -> float:
    """When the first measured call was enqueued; minus infinity in a run without warm-up."""
    warm = (record.calls["flags"] & FLAG_WARMUP) != 0
    return float(record.calls["enqueued_s"][~warm].min(initial=np.inf)) if warm.any() else -np.inf


def session_times(record: RunRecord) -> SessionTimes:
    """First enqueue to last token of every session, from its own and its children's calls (SPEC §1, §6)."""
    calls = record.calls
    session, enqueued_s = calls["session"], calls["enqueued_s"]
    parents = record.session_parents
    known = max(int(session.max(initial=0)), *parents, *parents.values(), -1) + 1
    first_s, last_s = np.full(known, np.inf), np.full(known, -np.inf)
    np.minimum.at(first_s, session, enqueued_s)
    np.maximum.at(last_s, session, enqueued_s + calls["e2e_s"])
    failed = np.bincount(session[calls["outcome"] != COMPLETED], minlength=known) > 0
    warm = np.bincount(session[(calls["flags"] & FLAG_WARMUP) != 0], minlength=known) > 0
    for child in sorted(parents):
        ancestor: int | None = parents[child]
        while ancestor is not None:
            first_s[ancestor] = min(first_s[ancestor], first_s[child])
            last_s[ancestor] = max(last_s[ancestor], last_s[child])
            failed[ancestor] |= failed[child]
            ancestor = parents.get(ancestor)
    with np.errstate(invalid="ignore"):
        sct_s = np.where(failed, np.inf, last_s - first_s)
    sct_s[warm | (last_s == -np.inf)] = np.nan
    is_child = np.zeros(known, dtype=bool)
    is_child[list(parents)] = True
    return SessionTimes(sct_s, is_child)
