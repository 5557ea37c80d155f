"""Numbers over seeds: mean, spread and 95 % intervals, and paired differences of runs that share their random numbers.

Intervals are Student's t on the seeds' values; a pair of configurations is compared seed by seed, so that the draw-to-draw
spread of the workload cancels (SPEC §6: fixed replay).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from talaria.report.measured import Array, session_times
from talaria.report.metrics import METRICS
from talaria.report.record import RunRecord

CONFIDENCE = 0.95

Values = Mapping[str, float | None]
"""Metrics of one seed by name."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. ``std`` (n−1) and the 95 % interval ``[low, high]`` are ``None`` below two values."""

    mean: float | None
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What a comparison keeps of one seed: its metrics and the SCT of every top-level session by number, in seconds."""

    metrics: Values
    sct_s: Array


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean over seeds of (metric under ``a`` − metric under ``b``), with its 95 % interval over seeds.

    ``sessions_improved`` is the one metric that is no difference: sessions that end sooner under ``a`` than under ``b``.
    """

    a: str
    b: str
    metric: str
    estimate: Estimate


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean, standard deviation and 95 % t interval of the values that are defined."""
    defined = [value for value in values if value is not None]
    if not defined:
        return Estimate(None, None, None, None)
    mean = math.fsum(defined) / len(defined)
    if len(defined) == 1:
        return Estimate(mean, None, None, None)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in defined) / (len(defined) - 1))
    half = t_quantile(len(defined) - 1) * std / math.sqrt(len(defined))
    return Estimate(mean, std, mean - half, mean + half)


def t_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t with ``degrees`` ≥ 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def over_seeds(per_seed: Sequence[Values]) -> dict[str, Estimate]:
    """An estimate per metric, in registry order, from the metrics of each seed."""
    return {name: estimate([values[name] for values in per_seed]) for name in METRICS if per_seed and name in per_seed[0]}


def sct_by_session(record: RunRecord) -> Array:
    """SCT in seconds by session number: infinite if not completed, NaN for children and outside the measured window."""
    times = session_times(record)
    return np.where(times.is_child, np.nan, times.sct_s)


def sessions_improved(a: Array, b: Array) -> int:
    """Sessions that complete strictly sooner in ``a`` than in ``b`` (arrays of ``sct_by_session`` of the same workload).

    A session that completes only in ``a`` counts; one that is outside either measured window does not.
    """
    shared = min(len(a), len(b))
    return int(np.count_nonzero(a[:shared] < b[:shared]))


def paired(configs: Mapping[str, Sequence[SeedResult]]) -> list[PairedDifference]:
    """Differences between every two configurations, in the order given: each metric, then ``sessions_improved``.

    The n-th results of all configurations belong to the same seed; seeds that only some of them finished are left out,
    as is a seed in which one side's metric is undefined.
    """
    names, differences = list(configs), []
    for index, a in enumerate(names):
        for b in names[index + 1 :]:
            seeds = list(zip(configs[a], configs[b], strict=False))
            for metric in METRICS:
                gaps = [_difference(left.metrics[metric], right.metrics[metric]) for left, right in seeds]
                differences.append(PairedDifference(a, b, metric, estimate(gaps)))
            counts = [float(sessions_improved(left.sct_s, right.sct_s)) for left, right in seeds]
            differences.append(PairedDifference(a, b, "sessions_improved", estimate(counts)))
    return differences


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
