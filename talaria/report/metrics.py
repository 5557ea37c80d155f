"""Every metric of a run, each defined once: its docstring gives numerator, denominator, moment of measurement and unit.

The registry ``METRICS`` is what the command line, the documents, the tables and the HTML report read, so a definition
printed beside a number is always the one that computed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, SupportsFloat

import numpy as np

from talaria.report.measured import FAILED, SHED, Array, Measured, measured
from talaria.report.record import (
    FLAG_AVOIDABLE,
    FLAG_LEASE_HIT,
    FLAG_OPEN,
    FLAG_RESIDENCY_HIT,
    FLAG_SAME_INSTANCE,
    KV_DEVICE,
    KV_HOST,
    KV_MISSING,
    PATHS,
    RunRecord,
)
from talaria.workload.stats import nearest_rank

Better = Literal["lower", "higher"]
Compute = Callable[[Measured], float | None]

OPEN = PATHS.index("open")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a run. ``better`` is the direction of improvement, ``None`` where neither is; ``doc`` defines it."""

    unit: str
    better: Better | None
    doc: str
    compute: Compute


METRICS: dict[str, Metric] = {}


def metrics(record: RunRecord) -> dict[str, float | None]:
    """Every metric of ``record`` by name, in registry order; ``None`` where its denominator is empty."""
    run = measured(record)
    return {name: metric.compute(run) for name, metric in METRICS.items()}


def objective(record: RunRecord, name: str) -> float:
    """The value of metric ``name`` for an optimiser: never undefined, and SCT counts every session.

    A session with a shed or failed call has infinite SCT here, so dropping calls cannot look like an improvement. A
    metric that is undefined in this run takes the worst value of its direction (infinity where it has none). Raises
    KeyError for a name that is not in ``METRICS``.
    """
    metric, run = METRICS[name], measured(record)
    value = OBJECTIVES.get(name, metric.compute)(run)
    if value is None:
        return -math.inf if metric.better == "higher" else math.inf
    return value


def metric(unit: str, better: Better | None) -> Callable[[Compute], Compute]:
    """Register a function under its own name, with its docstring as the definition."""

    def register(function: Compute) -> Compute:
        METRICS[function.__name__] = Metric(unit, better, " ".join((function.__doc__ or "").split()), function)
        return function

    return register


def _percentile(values: Array, percent: float) -> float | None:
    return nearest_rank(np.sort(values).data, percent) if len(values) else None


def _mean(values: Array) -> float | None:
    return float(np.mean(values, dtype=float)) if len(values) else None


def _share(part: SupportsFloat, whole: SupportsFloat) -> float | None:
    return float(part) / float(whole) if whole else None


def _flagged(run: Measured, flag: int) -> Array:
    marked: Array = (run.flags & flag) != 0
    return marked


# --- sessions and calls -------------------------------------------------------------------------------------------


@metric("s", "lower")
def sct_p50_s(run: Measured) -> float | None:
    """Median session completion time: first enqueue to last token over all calls of a top-level session and its
    children, over sessions whose calls all completed; nearest rank; measured at the session's end."""
    return _percentile(run.sessions.completed, 50)


@metric("s", "lower")
def sct_p95_s(run: Measured) -> float | None:
    """95th percentile of session completion time, over the sessions of sct_p50_s; nearest rank."""
    return _percentile(run.sessions.completed, 95)


@metric("s", "lower")
def sct_mean_s(run: Measured) -> float | None:
    """Sum of session completion times over the number of sessions, for the sessions of sct_p50_s."""
    return _mean(run.sessions.completed)


@metric("s", "lower")
def ttft_p50_s(run: Measured) -> float | None:
    """Median time to first token, schedule-aware: intended enqueue to first token, every admission delay included,
    over completed calls; nearest rank; measured at the first token."""
    return _percentile(run.ttft_s[run.completed], 50)


@metric("s", "lower")
def ttft_p95_s(run: Measured) -> float | None:
    """95th percentile of schedule-aware time to first token, over completed calls; nearest rank."""
    return _percentile(run.ttft_s[run.completed], 95)


@metric("s", "lower")
def return_ttft_p50_s(run: Measured) -> float | None:
    """Median schedule-aware time to first token over completed continuations; nearest rank."""
    return _percentile(run.ttft_s[run.completed & run.returns], 50)


@metric("s", "lower")
def return_ttft_p95_s(run: Measured) -> float | None:
    """95th percentile of schedule-aware time to first token over completed continuations; nearest rank."""
    return _percentile(run.ttft_s[run.completed & run.returns], 95)


@metric("s", "lower")
def tpot_p50_s(run: Measured) -> float | None:
    """Median over completed calls of at least two output tokens of (last token − first token) / (output tokens − 1),
    time between decode grants included; nearest rank; measured at the last token."""
    kept = run.completed & (run.output_tokens >= 2)
    return _percentile((run.e2e_s[kept] - run.ttft_s[kept]) / (run.output_tokens[kept] - 1.0), 50)


# --- rounds and switches ------------------------------------------------------------------------------------------


@metric("", None)
def rounds(run: Measured) -> float:
    """Number of scheduling rounds that ended, over all cold instances."""
    return float(len(run.round_wall_s))


@metric("s", "lower")
def round_wall_s(run: Measured) -> float:
    """Sum of the rounds' wall time, first slot to last, over all cold instances; equals active_s + switch_s."""
    return float(run.round_wall_s.sum())


@metric("s", "lower")
def active_s(run: Measured) -> float:
    """Sum over rounds of the time in which a model held the instance (prefill, decode, linger), switches excluded."""
    return float(run.round_active_s.sum())


@metric("s", "lower")
def switch_s(run: Measured) -> float:
    """Sum over rounds of the time spent in switches and opens; measured per round at its end."""
    return float(run.round_switch_s.sum())


@metric("", "lower")
def switch_share(run: Measured) -> float | None:
    """switch_s over round_wall_s."""
    return _share(run.round_switch_s.sum(), run.round_wall_s.sum())


@metric("", "lower")
def switches(run: Measured) -> float:
    """Number of logical switches (all ranks of an instance count once) to a model that was not absent."""
    return float(np.count_nonzero(run.switch_path != OPEN))


@metric("s", "lower")
def switch_p50_s(run: Measured) -> float | None:
    """Median duration of a logical switch, its slowest rank, opens excluded; nearest rank."""
    return _percentile(run.switch_total_s[run.switch_path != OPEN], 50)


@metric("s", "lower")
def switch_mean_s(run: Measured) -> float | None:
    """Sum of the durations of logical switches over their number, opens excluded."""
    return _mean(run.switch_total_s[run.switch_path != OPEN])


@metric("s", "lower")
def switch_p95_s(run: Measured) -> float | None:
    """95th percentile of the duration of a logical switch, opens excluded; nearest rank."""
    return _percentile(run.switch_total_s[run.switch_path != OPEN], 95)


def _path_share(run: Measured, path: str) -> float | None:
    return _share(np.count_nonzero(run.switch_path == PATHS.index(path)), np.count_nonzero(run.switch_path != OPEN))


@metric("", "higher")
def path_d2d(run: Measured) -> float | None:
    """Logical switches whose worst rank found all its weights staged on the device, over all logical switches."""
    return _path_share(run, "d2d")


@metric("", None)
def path_partial(run: Measured) -> float | None:
    """Logical switches whose worst rank combined staged chunks with host copies, over all logical switches."""
    return _path_share(run, "partial")


@metric("", "lower")
def path_h2d(run: Measured) -> float | None:
    """Logical switches whose worst rank loaded every weight from the host, over all logical switches."""
    return _path_share(run, "h2d")


@metric("", None)
def sp_admitted(run: Measured) -> float:
    """Handling events that admitted a waiting return by session-prefill, summed over rounds at their end."""
    return float(run.round_sp_admitted.sum())


@metric("", "lower")
def sp_parked(run: Measured) -> float:
    """Handling events that left a waiting return for a later slot, summed over rounds; a call can be parked again."""
    return float(run.round_parked.sum())


@metric("", "higher")
def sp_admission_rate(run: Measured) -> float | None:
    """sp_admitted over (sp_admitted + sp_parked)."""
    admitted = run.round_sp_admitted.sum()
    return _share(admitted, admitted + run.round_parked.sum())


@metric("", None)
def events_per_round_admitted(run: Measured) -> float | None:
    """sp_admitted over rounds."""
    return _share(run.round_sp_admitted.sum(), len(run.round_wall_s))


@metric("", "lower")
def events_per_round_deferred(run: Measured) -> float | None:
    """sp_parked over rounds."""
    return _share(run.round_parked.sum(), len(run.round_wall_s))


# --- placement ----------------------------------------------------------------------------------------------------


@metric("", "lower")
def model_opens(run: Measured) -> float:
    """Calls whose model was absent on the chosen instance at placement, whether or not an earlier call waited for it there too:
    the published opens and residency hits of one run add up to its calls."""
    return float(np.count_nonzero(_flagged(run, FLAG_OPEN)))


@metric("", "lower")
def avoidable_opens(run: Measured) -> float:
    """The calls of model_opens for which another healthy instance had the model resident at placement, by its last snapshot."""
    return float(np.count_nonzero(_flagged(run, FLAG_AVOIDABLE)))


@metric("", "higher")
def same_instance_return(run: Measured) -> float | None:
    """Continuations placed on the instance that served their line's previous call, over placed continuations."""
    return _share(np.count_nonzero(run.returns & _flagged(run, FLAG_SAME_INSTANCE)), np.count_nonzero(run.returns))


@metric("", "higher")
def residency_hit(run: Measured) -> float | None:
    """Calls whose model was active, staged or resident on the chosen instance at placement, over placed calls."""
    placed = run.outcome != SHED
    return _share(np.count_nonzero(placed & _flagged(run, FLAG_RESIDENCY_HIT)), np.count_nonzero(placed))


@metric("", "lower")
def unused_lease(run: Measured) -> float | None:
    """Leases to whose instance no return came before they expired, over leases granted (the unused-lease proxy)."""
    return _share(run.record.leases_unused, run.record.leases_granted)


@metric("", "higher")
def lease_hit(run: Measured) -> float | None:
    """Continuations routed by a live lease, over placed continuations; measured at placement."""
    return _share(np.count_nonzero(run.returns & _flagged(run, FLAG_LEASE_HIT)), np.count_nonzero(run.returns))


def _kv_share(run: Measured, state: int) -> float | None:
    kept = run.returns & run.completed
    return _share(np.count_nonzero(run.kv_state[kept] == state), np.count_nonzero(kept))


@metric("", "higher")
def kv_device(run: Measured) -> float | None:
    """Completed continuations most of whose reusable prefix was on the device at admission, over completed continuations."""
    return _kv_share(run, KV_DEVICE)


@metric("", "higher")
def kv_host(run: Measured) -> float | None:
    """Completed continuations most of whose reusable prefix was restored from the host registry, over completed ones."""
    return _kv_share(run, KV_HOST)


@metric("", "lower")
def kv_missing(run: Measured) -> float | None:
    """Completed continuations most of whose reusable prefix was found nowhere and recomputed, over completed ones."""
    return _kv_share(run, KV_MISSING)


@metric("", "lower")
def restore_skips(run: Measured) -> float:
    """Host restores declined because a recurrent state was incomplete, all families together."""
    return float(sum(run.record.restore_skips.values()))


@metric("", "lower")
def host_capacity_misses(run: Measured) -> float:
    """Calls that lost reusable tokens because the host registry had evicted them for want of capacity."""
    return float(run.record.host_capacity_misses)


@metric("GiB", "lower")
def peak_hbm_gib(run: Measured) -> float:
    """Most memory reserved on any GPU: the managed buffer (weights, KV, staged chunks, runtime) and the residue of opened models."""
    return run.record.peak_hbm_bytes / GIB


# --- safety and size ----------------------------------------------------------------------------------------------


@metric("", "lower")
def deadline_risk(run: Measured) -> float:
    """Rounds whose predicted or actual length passed the TTFT bound gamma·T_TTFT, over all instances."""
    return float(run.record.deadline_risk)


@metric("", "lower")
def max_wait_rounds(run: Measured) -> float:
    """Largest number of rounds that any one call waited before it was admitted."""
    return float(run.rounds_waited.max(initial=0))


@metric("", "higher")
def sessions_completed(run: Measured) -> float:
    """Top-level sessions whose calls, children's included, all completed; the sessions of sct_p50_s."""
    return float(len(run.sessions.completed))


@metric("", "higher")
def calls_completed(run: Measured) -> float:
    """Calls that delivered their last token."""
    return float(np.count_nonzero(run.completed))


@metric("", "lower")
def calls_shed(run: Measured) -> float:
    """Calls that the overload policy refused."""
    return float(np.count_nonzero(run.outcome == SHED))


@metric("", "lower")
def calls_failed(run: Measured) -> float:
    """Calls that were accepted and did not complete."""
    return float(np.count_nonzero(run.outcome == FAILED))


@metric("s", "lower")
def makespan_s(run: Measured) -> float:
    """Start of the run to the end of its last call."""
    return float(run.record.makespan_s)


@metric("", None)
def events(run: Measured) -> float:
    """Events that the simulator's kernel processed; 0 on hardware."""
    return float(run.record.events)


OBJECTIVES: dict[str, Compute] = {
    "sct_p50_s": lambda run: _percentile(run.sessions.tasks, 50),
    "sct_p95_s": lambda run: _percentile(run.sessions.tasks, 95),
    "sct_mean_s": lambda run: _mean(run.sessions.tasks),
}
"""The same definitions with every measured session counted, unfinished ones as infinite."""
