"""A sweep: one knob, or a grid of two, tried value by value under the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from talaria.policy.knobs import BY_NAME
from talaria.report.document import Document, SweepPoint, for_file, sweep_document, to_json
from talaria.report.files import write_atomically
from talaria.report.statistics import Estimate, over_seeds
from talaria.sim.batch import Batch, Case, provenance
from talaria.sim.run import RunPlan

SCENARIOS = {
    "tau": "paper-tp4-tau",
    "lease_charge": "paper-tp4-tau",
    "overload": "paper-tp4-tau",
    "gamma": "paper-tp8",
    "nu": "four-by-five",
    "mu0": "four-by-five",
    "control_window": "four-by-five",
    "stale_after": "four-by-five",
}
"""Where a knob has something to trade; every other knob is swept on ``quickstart``."""

MAPPED = ("residency_hit", "return_ttft_p50_s", "sct_p50_s")
"""Metrics of the heat maps over two knobs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One swept knob and its values, in the order in which they are tried."""

    knob: str
    values: tuple[Any, ...]


def default_scenario(axes: Sequence[Axis]) -> str:
    """The scenario of the first knob that has one of its own."""
    return next((SCENARIOS[axis.knob] for axis in axes if axis.knob in SCENARIOS), "quickstart")


def grid(axes: Sequence[Axis]) -> list[tuple[Any, ...]]:
    """Every combination of values, the last knob varying fastest."""
    return list(product(*(axis.values for axis in axes)))


def cases(axes: Sequence[Axis], plan: Callable[[dict[str, object]], RunPlan], out: Path | None) -> list[Case]:
    """One case per point; ``plan`` resolves the run for knob values by name. Raises its InputError before anything runs."""
    found = []
    for values in grid(axes):
        knobs = {axis.knob: value for axis, value in zip(axes, values, strict=True)}
        label = ",".join(f"{name}={value}".lower() for name, value in knobs.items())
        found.append(Case(label, plan(knobs), out / label if out else None))
    return found


def finished_points(axes: Sequence[Axis], batch: Batch) -> list[SweepPoint]:
    """The points of ``batch`` all of whose seeds are finished."""
    points = []
    for case, values in zip(batch.cases, grid(axes), strict=True):
        results = batch.results[case.label]
        if len(results) == len(batch.seeds):
            points.append(SweepPoint(values, tuple(result.metrics for result in results)))
    return points


def finish(axes: Sequence[Axis], batch: Batch, plot_directory: Path, out: Path | None) -> Document | None:
    """Draw the finished points into ``plot_directory``, write ``sweep.json`` into ``out``; ``talaria.sweep/1``, or None without points."""
    from talaria.report.style import to_png

    points = finished_points(axes, batch)
    if not points:
        return None
    plot = plot_directory / f"sweep-{'-'.join(axis.knob for axis in axes)}.png"
    write_atomically(plot, to_png(_figure(axes, points)))
    first = batch.cases[0].plan
    document = sweep_document(
        knobs=[axis.knob for axis in axes],
        points=points,
        scenario=first.scenario.name,
        config=first.config.name,
        seeds=batch.seeds,
        provenance=provenance(first),
        plot=str(plot),
    )
    if out:
        write_atomically(out / "sweep.json", to_json(for_file(document)).encode())
    return document


def _figure(axes: Sequence[Axis], points: Sequence[SweepPoint]) -> Any:
    from talaria.report.sweep_figures import heat_maps, sweep_tradeoff

    estimates = {point.values: over_seeds(point.per_seed) for point in points}
    if len(axes) == 1:
        values = [point.values[0] for point in points]
        return sweep_tradeoff(axes[0].knob, BY_NAME[axes[0].knob].unit, values, list(estimates.values()))
    rows, columns = axes[0].values, axes[1].values
    means = {name: [[_mean(estimates.get((row, column)), name) for column in columns] for row in rows] for name in MAPPED}
    return heat_maps((axes[0].knob, axes[1].knob), rows, columns, means)


def _mean(estimates: Mapping[str, Estimate] | None, name: str) -> float | None:
    return estimates[name].mean if estimates else None
