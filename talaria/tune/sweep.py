"""A sweep: one knob, or a grid of two, tried value by value under the same seeds. Its points are the planned trials of a study."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from talaria.policy.knobs import BY_NAME, as_dict
from talaria.report.document import Document, SweepPoint, for_file, sweep_document, to_json
from talaria.report.files import write_atomically
from talaria.report.statistics import Estimate, over_seeds
from talaria.sim.batch import Batch, Case, provenance
from talaria.sim.interrupts import deferred
from talaria.sim.parallel import Pool
from talaria.sim.run import RunPlan
from talaria.tune.beats import Beats, Pulse
from talaria.tune.places import between, end, give_back
from talaria.tune.samplers import Planned
from talaria.tune.study import PLANNED, Design, Studied
from talaria.tune.task import origin

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
VALUE = "sct_p95_s"
"""What a point is worth as a trial of its study."""
BATCH = 4
"""Points in flight in one process."""
POLL_S = 0.5
PER_SEED = "per_seed"
"""The trial attribute with the metrics of every seed."""


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


class Sweep:
    """The points of ``axes`` as a study in ``storage``, called ``name`` or by what it is. Points that it already has are not run again.

    ``decisions`` and ``timeline``: see ``Batch``. Raises InputError if a study of that name is another one.
    """

    def __init__(
        self, axes: Sequence[Axis], cases: Sequence[Case], seeds: Sequence[int], storage: BaseStorage, name: str | None, *,
        decisions: bool = False, timeline: bool = False, pulse: Pulse | None = None,
    ) -> None:  # fmt: skip
        self.axes, self.cases, self.seeds = axes, cases, seeds
        self.warnings: dict[str, None] = {}
        self._files = {"decisions": decisions, "timeline": timeline}
        self._pulse = pulse or Pulse()
        points = [{axis.knob: value for axis, value in zip(axes, values, strict=True)} for values in grid(axes)]
        first = cases[0].plan
        swept = {axis.knob: list(axis.values) for axis in axes}
        fixed = {knob: value for knob, value in as_dict(first.knobs).items() if knob not in swept}
        identity = {"kind": "sweep", "knobs": swept, "set": fixed, "seeds": list(seeds), **origin([first])}
        design = Design(
            name or f"sweep-{'-'.join(axis.knob for axis in axes)}-{_short_hash(identity)}", identity, [VALUE], ["minimize"],
            {axis.knob: _distribution(axis) for axis in axes}, points,
        )  # fmt: skip
        self.studied = Studied(design, storage, len(points), sampler=Planned(points[0]), pruner=NopPruner())

    def runs_left(self) -> int:
        """Runs that are still to do, as far as this process knows."""
        return (len(self.cases) - len(self._done())) * len(self.seeds)

    def run(self, pool: Pool, advance: Callable[[], None]) -> bool:
        """Run the points that nobody else runs, until all are finished; whether they are: False if interrupted.

        An interrupt leaves whole points only, and those in flight to whoever comes next.
        """
        with Beats(self.studied.study, self._pulse) as beats:
            while True:
                trials = self.studied.trials()
                if len(self._done()) >= len(self.cases) or not _is_alive(trials, len(self.cases)):
                    return True
                beats.retry_dead(trials)
                batch: dict[int, Trial] = {}
                try:
                    with deferred():
                        self._ask(batch, beats)
                    if batch and not self._run_batch(batch, pool, advance):
                        return False
                    if not batch:
                        time.sleep(POLL_S)
                finally:
                    with deferred():
                        self._give_back(batch)
                    for trial in batch.values():
                        beats.stop(trial)

    def _ask(self, batch: dict[int, Trial], beats: Beats) -> None:
        while len(batch) < BATCH:
            trial = self.studied.ask()
            if trial is None:
                break
            beats.start(trial)
            batch[trial.user_attrs[PLANNED]] = trial

    def _give_back(self, batch: Mapping[int, Trial]) -> None:
        """What is still running here is somebody else's to run."""
        numbers = {trial.number for trial in batch.values()}
        for trial in self.studied.trials():
            if trial.number in numbers and trial.state == TrialState.RUNNING:
                give_back(self.studied.study, trial)

    def _run_batch(self, batch: Mapping[int, Trial], pool: Pool, advance: Callable[[], None]) -> bool:
        """Whether all of it was run. Run directories are there before their points count as finished."""
        trials = {self.cases[number].label: trial for number, trial in sorted(batch.items())}
        with Batch([self.cases[number] for number in sorted(batch)], self.seeds, by_seed=False, **self._files) as runs:
            whole = True
            with closing(runs.run(pool)) as outcomes:
                try:
                    for _ in outcomes:
                        advance()
                except KeyboardInterrupt:
                    whole = False
            with deferred():
                self.warnings.update(runs.warnings)
                runs.finish(peak_rss_mib=0.0)
                for label, trial in trials.items():
                    if len(runs.results[label]) == len(self.seeds):
                        self._finish_point(trial, [result.metrics for result in runs.results[label]])
        return whole

    def _finish_point(self, trial: Trial, per_seed: Sequence[Mapping[str, float | None]]) -> None:
        """Unless the trial was thought dead in the meantime: then whoever took it up finishes the point."""
        try:
            trial.set_user_attr(PER_SEED, [dict(values) for values in per_seed])
        except UpdateFinishedTrialError:
            return
        value = over_seeds(per_seed)[VALUE].mean
        end(self.studied.study, trial.number, state=TrialState.COMPLETE, values=[math.inf if value is None else value])

    def _done(self) -> dict[int, FrozenTrial]:
        """Finished trials by the number of their point."""
        return {trial.user_attrs[PLANNED]: trial for trial in self.studied.finished()}

    def points(self) -> list[SweepPoint]:
        """The finished points, in the order of the grid."""
        done = self._done()
        return [
            SweepPoint(values, tuple(done[number].user_attrs[PER_SEED])) for number, values in enumerate(grid(self.axes)) if number in done
        ]


def finish(sweep: Sweep, plot_directory: Path, out: Path | None) -> Document | None:
    """Draw the finished points into ``plot_directory``, write ``sweep.json`` into ``out``; ``talaria.sweep/1``, or None without points."""
    from talaria.report.style import to_png

    points = sweep.points()
    if not points:
        return None
    plot = plot_directory / f"sweep-{'-'.join(axis.knob for axis in sweep.axes)}.png"
    write_atomically(plot, to_png(_figure(sweep.axes, points)))
    first = sweep.cases[0].plan
    document = sweep_document(
        knobs=[axis.knob for axis in sweep.axes],
        points=points,
        scenario=first.scenario.name,
        config=first.config.name,
        seeds=sweep.seeds,
        provenance=provenance(first),
        plot=str(plot),
    )
    if out:
        write_atomically(out / "sweep.json", to_json(for_file(document)).encode())
    return document


def _is_alive(trials: Sequence[FrozenTrial], points: int) -> bool:
    """Whether some point is still to come: not so if each is finished or has failed for good."""
    queued = {trial.user_attrs.get(PLANNED) for trial in trials}
    return len(queued) < points or bool(between(trials)) or any(trial.state in (TrialState.WAITING, TrialState.RUNNING) for trial in trials)


def _distribution(axis: Axis) -> BaseDistribution:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in axis.values)
    if not numbers:
        return CategoricalDistribution(axis.values)
    low, high = min(axis.values), max(axis.values)
    return IntDistribution(low, high) if isinstance(low, int) else FloatDistribution(low, high)


def _short_hash(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]


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
