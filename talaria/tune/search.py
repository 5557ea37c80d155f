"""The search: asks for trials, runs their draws in step on the pool, reports each draw to the pruner, tells the ends.

A batch of trials goes draw by draw, and what a trial is told depends on no timing: one process gives the same study with any
``--jobs``. Several processes share the trials of one storage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from talaria.sim.interrupts import deferred
from talaria.sim.parallel import Pool
from talaria.tune.beats import Beats, Pulse
from talaria.tune.goals import by_scenario
from talaria.tune.places import end, finished, give_back
from talaria.tune.samplers import CMAES, PerTrial
from talaria.tune.study import PLANNED, Design, Studied
from talaria.tune.task import Measured, Replay, Task, Values, feasible, measure

BATCH = 4
"""Trials in flight in one process: enough to keep several workers busy, few enough that each learns from those before it."""
STARTUP_TRIALS = 8
"""Complete trials before the median of a draw is worth comparing with."""
POLL_S = 0.5

DRAWS, REFUSED = "draws", "refused"
"""Trial attributes: metrics by draw and scenario; why the knobs of a trial cannot be run."""


@dataclass
class Running:
    """A trial in flight and what its draws have given, ``draws[draw][scenario]``."""

    trial: Trial
    draws: list[list[Values]] = field(default_factory=list)


class Search:
    """A task's trials in ``storage`` under the study ``name``; ``sampler`` by name, ``seed`` its seed."""

    def __init__(self, task: Task, storage: BaseStorage, name: str, total: int, *, sampler: str, seed: int, pulse: Pulse) -> None:
        self.task, self._pulse, self._rejects = task, pulse, sampler == CMAES
        pruner: BasePruner = MedianPruner(STARTUP_TRIALS, n_warmup_steps=0) if len(task.objectives) == 1 else NopPruner()
        design = Design(
            name,
            {"kind": "tune", "sampler": sampler, "seed": seed, **task.document()},
            [item.name for item in task.objectives],
            [item.direction for item in task.objectives],
            {item.name: item.distribution() for item in task.space},
            [task.first],
        )
        self.studied = Studied(design, storage, total, sampler=PerTrial(sampler, seed), pruner=pruner)
        self._costs_s = dict.fromkeys(range(len(task.scenarios)), 0.0)

    def run(self, pool: Pool, tell: Callable[[Sequence[FrozenTrial]], None]) -> None:
        """Until the study has its trials, whoever runs them; ``tell`` is called with those that are finished, after every batch.

        An interrupt gives the trials in flight back to the queue.
        """
        with Beats(self.studied.study, self._pulse) as beats:
            while True:
                trials = self.studied.trials()
                tell(finished(trials))
                if len(finished(trials)) >= self.studied.total:
                    return
                beats.retry_dead(trials)
                batch: list[Running] = []
                try:
                    with deferred():
                        self._ask(batch, beats)
                    self._run_batch(batch, pool)
                    if not batch:
                        time.sleep(POLL_S)
                except BaseException:
                    with deferred():
                        self._give_back(batch)
                    raise
                finally:
                    for item in batch:
                        beats.stop(item.trial)

    def _ask(self, batch: list[Running], beats: Beats) -> None:
        while len(batch) < BATCH:
            trial = self.studied.ask()
            if trial is None:
                break
            beats.start(trial)
            batch.append(Running(trial))

    def _give_back(self, batch: Sequence[Running]) -> None:
        """What is still running here is somebody else's to run."""
        left = {item.trial.number for item in batch}
        for trial in self.studied.trials():
            if trial.number in left and trial.state == TrialState.RUNNING:
                give_back(self.studied.study, trial)

    def _run_batch(self, batch: Sequence[Running], pool: Pool) -> None:
        live = list(batch)
        for seed in self.task.seeds:
            if live:
                results = self._draw(live, seed, pool)
                live = [item for item in live if self._goes_on(item, results[item.trial.number])]

    def _draw(self, live: Sequence[Running], seed: int, pool: Pool) -> dict[int, list[Measured]]:
        """One draw of every trial, by its number and by scenario; what takes longest starts first."""
        order = sorted(self._costs_s, key=lambda index: -self._costs_s[index])
        jobs = [(item.trial.number, index) for index in order for item in live]
        values = {item.trial.number: self.task.used(item.trial.params) for item in live}
        replays = [self.task.replay(self.task.scenarios[index], values[number], seed) for number, index in jobs]
        found: dict[int, dict[int, Measured]] = {item.trial.number: {} for item in live}
        for (number, index), result in zip(jobs, pool.map(measure, replays), strict=True):
            found[number][index] = result
            self._costs_s[index] = max(self._costs_s[index], result.cpu_s)
        return {number: [results[index] for index in sorted(results)] for number, results in found.items()}

    def _goes_on(self, item: Running, results: Sequence[Measured]) -> bool:
        """Take one draw's results; whether there is another to run. A trial that was thought dead in the meantime is dropped."""
        try:
            return self._take(item, results)
        except UpdateFinishedTrialError:
            return False

    def _take(self, item: Running, results: Sequence[Measured]) -> bool:
        refused = next((result.refused for result in results if result.refused), "")
        if refused:
            item.trial.set_user_attr(REFUSED, refused)
            end(self.studied.study, item.trial.number, state=TrialState.PRUNED)
            return False
        item.draws.append([result.values for result in results])
        if len(self.task.objectives) == 1:
            (objective,) = self.task.objectives
            item.trial.report(objective.combine(by_scenario(item.draws, objective.name)), len(item.draws) - 1)
        if len(item.draws) == len(self.task.seeds):
            self._complete(item)
            return False
        if len(self.task.objectives) > 1 or PLANNED in item.trial.user_attrs or not item.trial.should_prune():
            return True
        item.trial.set_user_attr(DRAWS, item.draws)
        end(self.studied.study, item.trial.number, state=TrialState.PRUNED)
        return False

    def _complete(self, item: Running) -> None:
        item.trial.set_user_attr(DRAWS, item.draws)
        violations = {str(limit): limit.violation(by_scenario(item.draws, limit.metric)) for limit in self.task.constraints}
        if self._rejects and not feasible(list(violations.values())) and PLANNED not in item.trial.user_attrs:
            end(self.studied.study, item.trial.number, state=TrialState.PRUNED)  # CMA-ES knows no constraints: it is to sample anew
            return
        if not self._rejects:
            for name, value in violations.items():
                if name not in item.trial.constraints:  # a trial that died between this and its end has them
                    item.trial.set_constraint(name, value)
        values = [objective.combine(by_scenario(item.draws, objective.name)) for objective in self.task.objectives]
        end(self.studied.study, item.trial.number, state=TrialState.COMPLETE, values=values)


def replays_of(task: Task, params: Mapping[str, object], seeds: Sequence[int]) -> list[Replay]:
    """All scenarios under one policy, draw by draw."""
    return [task.replay(scenario, params, seed) for seed in seeds for scenario in task.scenarios]
