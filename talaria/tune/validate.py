"""The guard against overfitting: the best trial and the baseline on draws that no trial has seen, compared draw by draw.

The baseline is what each scenario runs with where nothing is tuned: the defaults, as the scenario, the configuration and the knobs
that are given for all of them change them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from talaria.errors import InputError
from talaria.report.statistics import Estimate, estimate
from talaria.sim.parallel import Pool
from talaria.tune.goals import ByScenario, Objective, by_scenario
from talaria.tune.search import DRAWS, replays_of
from talaria.tune.task import Task, Values, feasible, measure

GAIN, LOSS, NO_GAIN = "gain", "loss", "no significant gain"

Draws = Sequence[Sequence[Values]]
"""``draws[draw][scenario]``, metrics by name."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """What the tuned policy gains on the baseline by one objective. ``low``/``high``: 95 % over draws; a share of the baseline's
    value for seconds, else a difference; None where a draw is infinite or there is one draw only."""

    baseline: float
    tuned: float
    mean: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """Whether it is a gain."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return NO_GAIN
        return GAIN if self.low > 0.0 else LOSS


@dataclass(frozen=True, slots=True)
class Validation:
    """The two policies on ``seeds``: improvements over all scenarios and in each, and the constraints that the tuned one misses."""

    seeds: tuple[int, ...]
    overall: dict[str, Improvement]
    by_scenario: dict[str, dict[str, Improvement]]
    missed: tuple[str, ...]


def candidates(task: Task, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Complete trials that hold every constraint, with finite values."""
    return [
        trial
        for trial in trials
        if trial.state == TrialState.COMPLETE
        and all(math.isfinite(value) for value in trial.values)
        and feasible([limit.violation(by_scenario(trial.user_attrs[DRAWS], limit.metric)) for limit in task.constraints])
    ]


def front(task: Task, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those of the candidates that no other betters in every objective, by the first objective; with one objective the best alone."""
    keys = {trial.number: _costs(task, trial) for trial in trials}
    best = [trial for trial in trials if not any(_dominates(keys[other.number], keys[trial.number]) for other in trials)]
    unique = {keys[trial.number]: trial for trial in reversed(best)}
    return sorted(unique.values(), key=lambda trial: keys[trial.number])


def choose(task: Task, trials: Sequence[FrozenTrial]) -> FrozenTrial:
    """The trial that becomes the policy: of the front the one with the best mean standing between its ends.

    Raises InputError if no trial holds the constraints: the nearest one is named.
    """
    possible = candidates(task, trials)
    if not possible:
        raise _impossible(task, trials)
    chosen = front(task, possible)
    columns = list(zip(*(_costs(task, trial) for trial in chosen), strict=True))

    def standing(trial: FrozenTrial) -> float:
        spans = zip(_costs(task, trial), columns, strict=True)
        return math.fsum((cost - min(column)) / ((max(column) - min(column)) or 1.0) for cost, column in spans)

    return min(chosen, key=lambda trial: (standing(trial), trial.number))


def validate(task: Task, tuned: Mapping[str, Any], seeds: Sequence[int], pool: Pool) -> Validation:
    """Run the baseline and ``tuned`` on ``seeds`` and compare them."""
    base, other = replayed(task, [{}, tuned], seeds, pool)
    names = [scenario.name for scenario in task.scenarios]
    each = {
        name: {goal.name: improvement(goal, _only(base, index), _only(other, index)) for goal in task.objectives}
        for index, name in enumerate(names)
    }
    missed = [limit for limit in task.constraints if not feasible([limit.violation(by_scenario(other, limit.metric))])]
    return Validation(tuple(seeds), improvements(task, base, other), each, tuple(str(limit) for limit in missed))


def replayed(task: Task, policies: Sequence[Mapping[str, Any]], seeds: Sequence[int], pool: Pool) -> list[Draws]:
    """What each policy gives on ``seeds``; of the baseline without any values."""
    replays = [replay for values in policies for replay in replays_of(task, values, seeds)]
    results = [measured.values for measured in pool.map(measure, replays)]
    width = len(task.scenarios)
    rows = [results[at : at + width] for at in range(0, len(results), width)]
    return [rows[at : at + len(seeds)] for at in range(0, len(rows), len(seeds))]


def improvements(task: Task, base: Draws, other: Draws) -> dict[str, Improvement]:
    """``other`` against ``base``, by objective, over all scenarios."""
    return {goal.name: improvement(goal, base, other) for goal in task.objectives}


def improvement(goal: Objective, base: Draws, other: Draws) -> Improvement:
    """Paired over draws: both policies had the same random numbers in each."""
    values = [by_scenario(draws, goal.name) for draws in (base, other)]
    gains = [goal.gain(*(goal.combine(_draw(side, number)) for side in values)) for number in range(len(base))]
    whole = estimate(gains) if None not in gains else Estimate(None, None, None, None)
    mean, low, high = (None if part is None else goal.as_improvement(part) for part in (whole.mean, whole.low, whole.high))
    return Improvement(goal.combine(values[0]), goal.combine(values[1]), mean, low, high)


def overfits(seen: Improvement, unseen: Improvement) -> bool:
    """Whether the search's draws promised more than new ones can be said to keep."""
    return seen.mean is not None and unseen.high is not None and seen.mean > max(unseen.high, 0.0)


def _draw(values: ByScenario, number: int) -> ByScenario:
    return [[draws[number]] for draws in values]


def _only(draws: Draws, index: int) -> list[list[Values]]:
    return [[row[index]] for row in draws]


def _costs(task: Task, trial: FrozenTrial) -> tuple[float, ...]:
    """Objective values, lower being better."""
    signs = (1.0 if goal.direction == "minimize" else -1.0 for goal in task.objectives)
    return tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))


def _dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a != b and all(left <= right for left, right in zip(a, b, strict=True))


def _impossible(task: Task, trials: Sequence[FrozenTrial]) -> InputError:
    """No trial holds the constraints: which came nearest, and what it had."""
    ran = [trial for trial in trials if trial.user_attrs.get(DRAWS)]

    def missed(trial: FrozenTrial) -> dict[str, float]:
        draws = trial.user_attrs[DRAWS]
        return {str(limit): limit.violation(by_scenario(draws, limit.metric)) for limit in task.constraints}

    nearest = min(ran, key=lambda trial: sum(max(value, 0.0) for value in missed(trial).values()))
    by = ", ".join(f"{name} by {value:.4g}" for name, value in missed(nearest).items() if not feasible([value]))
    return InputError(
        f"no trial of {len(trials)} holds the constraints: trial {nearest.number} comes nearest and misses {by or 'only a finite value'}",
        where="--constraint", fix="loosen them, widen --knobs or give more --trials",
    )  # fmt: skip
