"""The bars that a reproduction is held to, each with what was found: orders, speed-ups, trends and sizes of errors.

A check that does not hold is a finding about the simulator, shown like every other; nothing fails because of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from talaria.report.statistics import Estimate
from talaria.reproduce.experiments import REPLAY, ROUTERS, TAU_SWEEP, TAUS, Experiment, Findings

Rows = Sequence[dict[str, Any]]

MEDIAN_ERROR, MEAN_ERROR, P50_ERROR, P95_ERROR, TP4_ERROR, COMPONENT_ERROR = 0.10, 0.18, 0.15, 0.20, 0.30, 0.10
OPENS_OFF = 3
TREND_P = 0.01
IMPROVED_AT_LEAST = 28
RISING = ("talaria", "h2d-only", "no-hkvr", "no-sp", "round-only")
"""Configurations by published SCT p50."""
NO_WORSE = 1.03
"""Talaria may be so much slower than H2D-only and still count as no slower."""


@dataclass(frozen=True, slots=True)
class Check:
    """``bar`` in words, ``found`` in words, ``published`` beside it where there is such a value; None: nothing to hold."""

    name: str
    bar: str
    published: str
    found: str
    holds: bool | None


def checks(numbers: Rows, found: Findings) -> list[Check]:
    """All bars, against the rows of the document and the findings behind them."""
    return [*_errors(numbers), *_replay(numbers, found), *_placement(numbers, found), *_tau(found)]


def error_summary(numbers: Rows, groups: Sequence[str]) -> dict[str, Any]:
    """Absolute relative errors of the groups' results: median, mean, worst. ``undefined``: published zero, or never seen in a run."""
    results = [row for row in numbers if row["kind"] == "result" and row["group"] in groups]
    sizes = sorted((abs(row["error"]), f"{row['group']} {row['name']}") for row in results if row["error"] is not None)
    summary: dict[str, Any] = {"results": len(results), "undefined": len(results) - len(sizes)}
    summary |= {"median": None, "mean": None, "worst": None, "worst_name": None}
    if sizes:
        low, high = sizes[(len(sizes) - 1) // 2], sizes[len(sizes) // 2]
        summary["median"], summary["mean"] = (low[0] + high[0]) / 2, math.fsum(size for size, _ in sizes) / len(sizes)
        summary["worst"], summary["worst_name"] = sizes[-1]
    return summary


def _errors(numbers: Rows) -> list[Check]:
    summary = error_summary(numbers, ("tp8", "switch"))
    component = [row for row in numbers if row["group"] == "component" and row["name"].endswith("/p50")]
    p50 = [row for row in numbers if row["group"] == "tp8" and row["name"].endswith("sct_p50_s")]
    p95 = [row for row in numbers if row["group"] == "tp8" and row["name"].endswith("sct_p95_s")]
    return [
        _below("TP=8 median absolute error", summary["median"], MEDIAN_ERROR),
        _below("TP=8 mean absolute error", summary["mean"], MEAN_ERROR),
        _worst("SCT p50 of the five configurations", p50, P50_ERROR),
        _worst("SCT p95 where published", p95, P95_ERROR),
        _worst("switch component table at p50", component, COMPONENT_ERROR),
    ]


def _replay(numbers: Rows, found: Findings) -> list[Check]:
    published = {row["name"]: row["published"] for row in numbers if row["group"] == "tp8"}
    mean = {config: found.mean(Experiment(REPLAY, config), "sct_p50_s") for config in RISING}
    said = {config: published[f"{config.replace('-', '_')}/sct_p50_s"] for config in mean}
    result = []
    for a, b in pairwise(mean):
        bar, holds = f"{a} < {b}", mean[a] < mean[b]
        if a == "talaria":
            bar, holds = f"{a} ≤ {NO_WORSE:g} × {b}", mean[a] <= NO_WORSE * mean[b]
        result.append(Check("order of SCT p50", bar, f"{said[a]:g} s, {said[b]:g} s", f"{mean[a]:.0f} s, {mean[b]:.0f} s", holds))
    for name, allowed in (("sct_p50_s", P50_ERROR), ("sct_p95_s", P95_ERROR)):
        wanted = published[f"round_only/{name}"] / published[f"talaria/{name}"]
        gain = found.mean(Experiment(REPLAY, "round-only"), name) / found.mean(Experiment(REPLAY, "talaria"), name)
        holds = abs(gain / wanted - 1) <= allowed
        result.append(Check(f"speed-up round-only / talaria, {name}", f"within {allowed:.0%}", f"{wanted:.2f}", f"{gain:.2f}", holds))
    improved = found.improved(Experiment(REPLAY, "talaria"), Experiment(REPLAY, "round-only"))
    holds = improved.mean is not None and improved.mean >= IMPROVED_AT_LEAST
    said_improved = f"{published['sessions_improved_of_30']} of 30"
    result.append(Check("sessions improved over round-only", f"at least {IMPROVED_AT_LEAST} of 30", said_improved, _text(improved), holds))
    return result


def _placement(numbers: Rows, found: Findings) -> list[Check]:
    rows = [row for row in numbers if row["group"] == "placement" and row["kind"] == "result"]
    times = [row for row in rows if row["unit"] == "s"]
    opens = [row for row in rows if "opens" in row["name"]]
    off, where = max((abs(row["simulated"] - row["published"]), row["name"]) for row in opens)
    return [
        _worst("TP=4 times at medium and high load", times, TP4_ERROR),
        Check("TP=4 avoidable opens", f"within ±{OPENS_OFF}", "", f"{off:.1f} off ({where})", off <= OPENS_OFF),
        _order(rows, found, "high", "avoidable_opens", tuple(reversed(ROUTERS))),
        _order(rows, found, "high", "ttft_p95_s", tuple(reversed(ROUTERS))),
        _order(rows, found, "medium", "ttft_p50_s", ("full", "least-pressure", "session-sticky")),
    ]


def _tau(found: Findings) -> list[Check]:
    keys = [Experiment(TAU_SWEEP, "talaria", tau) for tau in TAUS]
    returns = [found.mean(key, "same_instance_return") for key in keys]
    hits = [found.mean(key, "residency_hit") for key in keys]
    waits = [found.estimate(key, "return_ttft_p95_s") for key in keys]
    best = min(range(len(TAUS)), key=lambda index: math.inf if (mean := waits[index].mean) is None else mean)
    return [
        _trend("same-instance returns", "rise", [found.column(key, "same_instance_return") for key in keys]),
        Check("… at every step", "rise", "", _steps(returns), all(a < b for a, b in pairwise(returns))),
        _trend("residency hits", "fall", [found.column(key, "residency_hit") for key in keys[::-1]]),
        Check("… at every step", "fall", "", _steps(hits), all(a > b for a, b in pairwise(hits))),
        Check("best τ by returning TTFT p95", "reported", "", f"τ = {TAUS[best]:g} s: {_text(waits[best])} s", None),
    ]


def _trend(name: str, way: str, rising: Sequence[Sequence[float]]) -> Check:
    """Whether seeds order ``rising``, a column each, more than by chance: a step between two τ is less than ten seeds move a mean."""
    from scipy.stats import page_trend_test

    bar = f"{way}, p < {TREND_P:g} (Page's test over seeds)"
    if len(rising[0]) < 2:
        return Check(f"{name} over τ", bar, "", "needs two seeds", None)
    p = float(page_trend_test(list(zip(*rising, strict=True))).pvalue)
    return Check(f"{name} over τ", bar, "", f"p = {p:.1g}", p < TREND_P)


def _below(name: str, value: float | None, bar: float) -> Check:
    text = "undefined" if value is None else f"{value:.1%}"
    return Check(name, f"at most {bar:.0%}", "", text, value is not None and value <= bar)


def _worst(name: str, rows: Rows, bar: float) -> Check:
    """The largest error of ``rows``; one that was never simulated is the largest of all."""
    size, where = max((math.inf if row["error"] is None else abs(row["error"]), row["name"]) for row in rows)
    inside = sum(row["error"] is not None and abs(row["error"]) <= bar for row in rows)
    text = f"{inside} of {len(rows)}; worst " + (f"{size:.0%}" if math.isfinite(size) else "undefined") + f" ({where})"
    return Check(name, f"each within {bar:.0%}", "", text, size <= bar)


def _order(rows: Rows, found: Findings, load: str, metric: str, rising: Sequence[str]) -> Check:
    """The routers' means at one load rise as the published ones do."""
    published = {row["name"]: row["published"] for row in rows}
    said = ", ".join(f"{published[f'{load}/{metric}/' + router.replace('-', '_')]:g}" for router in rising)
    means = [found.mean(Experiment(f"paper-tp4-{load}", router), metric) for router in rising]
    text = ", ".join(f"{value:.3g}" for value in means)
    return Check(f"order of {metric}, {load} load", " < ".join(rising), said, text, all(a < b for a, b in pairwise(means)))


def _steps(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _text(value: Estimate) -> str:
    if value.mean is None:
        return "undefined"
    return f"{value.mean:.3g}" if value.low is None else f"{value.mean:.3g} [{value.low:.3g}, {value.high:.3g}]"
