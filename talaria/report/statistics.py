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

_T_QUANTILES = (
    12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146, 2.4469118511449786,
    2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274, 2.200985160091639, 2.1788128296672284,
    2.1603686564627913, 2.144786687917804, 2.131449545559776, 2.1199052992212546, 2.1098155778333156, 2.1009220402410382,
    2.0930240544083087, 2.085963447265864, 2.0796138447276795, 2.0738730679040254, 2.0686576104190486, 2.0638985616280245,
    2.0595385527532972, 2.0555294386428735, 2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378,
)  # fmt: skip
"""``t_quantile`` of 1, 2, ... degrees: scipy's own takes longer to import than a replay to run."""

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
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
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
