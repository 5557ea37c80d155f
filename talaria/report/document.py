"""The JSON documents of the command line: one run, a comparison, a sweep (DESIGN, "CLI contract").

A document is a pure function of its inputs: floats are rounded to nine significant digits, keys are sorted, and what the
host machine did (``host``) is printed but never written to a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from talaria.report.statistics import Estimate, PairedDifference, Values, over_seeds

RUN_SCHEMA = "talaria.run/1"
COMPARE_SCHEMA = "talaria.compare/1"
SWEEP_SCHEMA = "talaria.sweep/1"

SIGNIFICANT_DIGITS = 9

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Host:
    """What a run cost the machine it ran on. ``sim_cpu_s``: mean CPU seconds of one seed, imports and files excluded."""

    sim_cpu_s: float
    wall_s: float
    peak_rss_mib: float


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One value of the swept knob (one per knob, in the order of ``knobs``) and the metrics of its seeds."""

    values: tuple[Any, ...]
    per_seed: tuple[Values, ...]


def run_document(
    *,
    scenario: str,
    config: str,
    policy: Mapping[str, Any],
    trace: Mapping[str, Any],
    seeds: Sequence[int],
    per_seed: Sequence[Values],
    provenance: Mapping[str, Any],
    host: Host | None = None,
) -> Document:
    """``talaria.run/1``: means and spread over ``seeds``, whose metrics are ``per_seed`` in the same order."""
    document: Document = {
        "schema": RUN_SCHEMA,
        "scenario": scenario,
        "config": config,
        "policy": dict(policy),
        "trace": dict(trace),
        "seeds": list(seeds),
        **_over_seeds(per_seed),
        "per_seed": [dict(values) for values in per_seed],
        "provenance": dict(provenance),
    }
    if host is not None:
        document["host"] = asdict(host)
    return _rounded(document)


def compare_document(runs: Mapping[str, Document], differences: Sequence[PairedDifference]) -> Document:
    """``talaria.compare/1`` from run documents by configuration and their paired differences."""
    return _rounded(
        {
            "schema": COMPARE_SCHEMA,
            "configs": {name: {key: value for key, value in run.items() if key != "schema"} for name, run in runs.items()},
            "paired": [
                {"a": entry.a, "b": entry.b, "metric": entry.metric, "diff": entry.estimate.mean, "ci95": _interval(entry.estimate)}
                for entry in differences
            ],
        }
    )


def sweep_document(
    *,
    knobs: Sequence[str],
    points: Sequence[SweepPoint],
    scenario: str,
    config: str,
    seeds: Sequence[int],
    provenance: Mapping[str, Any],
    plot: str | None,
) -> Document:
    """``talaria.sweep/1``. With two knobs ``knob`` joins their names by a comma and each ``value`` is a pair."""
    return _rounded(
        {
            "schema": SWEEP_SCHEMA,
            "knob": ",".join(knobs),
            "points": [
                {"value": point.values[0] if len(knobs) == 1 else list(point.values), **_over_seeds(point.per_seed)} for point in points
            ],
            "plot": plot,
            "scenario": scenario,
            "config": config,
            "seeds": list(seeds),
            "provenance": dict(provenance),
        }
    )


def _over_seeds(per_seed: Sequence[Values]) -> Document:
    estimates = over_seeds(per_seed)
    return {
        "metrics": {name: entry.mean for name, entry in estimates.items()},
        "spread": {name: {"std": entry.std, "ci95": _interval(entry)} for name, entry in estimates.items()},
    }


def _interval(entry: Estimate) -> list[float | None]:
    return [entry.low, entry.high]


def _rounded(document: Document) -> Document:
    return {key: rounded(value) for key, value in document.items()}


def rounded(value: Any) -> Any:
    """``value`` with every float at nine significant digits, mappings and sequences included; −0 becomes 0."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0 if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def to_json(document: Mapping[str, Any]) -> str:
    """The document as text: sorted keys, two spaces, one final newline. Raises ValueError for NaN or infinity."""
    return json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def for_file(document: Mapping[str, Any]) -> Document:
    """``document`` without what depends on the machine that ran it, at any depth of a comparison."""
    kept = {key: value for key, value in document.items() if key != "host"}
    if "configs" in kept:
        kept["configs"] = {name: for_file(run) for name, run in kept["configs"].items()}
    return kept
