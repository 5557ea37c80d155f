"""The guard against overfitting, on numbers whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from optuna.trial import FrozenTrial, create_trial

from talaria.errors import InputError
from talaria.sim.parallel import Pool
from talaria.tune.goals import parse_objectives
from talaria.tune.search import DRAWS
from talaria.tune.task import Values, measure
from talaria.tune.validate import GAIN, LOSS, NO_GAIN, Improvement, choose, front, improvement, overfits, validate
from tests.tune.small import small_task

(SECONDS,) = parse_objectives("sct_p95_s")


def draws(*values: float) -> list[list[Values]]:
    return [[{"sct_p95_s": value}] for value in values]


def test_draws_are_compared_in_pairs_so_that_their_own_spread_cancels() -> None:
    base = draws(100.0, 1000.0, 10.0)
    found = improvement(SECONDS, base, draws(90.0, 900.0, 9.0))
    assert [found.mean, found.low, found.high] == pytest.approx([0.1, 0.1, 0.1]) and found.verdict == GAIN
    assert improvement(SECONDS, draws(90.0, 900.0, 9.0), base).verdict == LOSS


def test_an_interval_that_includes_zero_is_no_significant_gain() -> None:
    found = improvement(SECONDS, draws(100.0, 100.0, 100.0), draws(80.0, 110.0, 95.0))
    assert found.mean is not None and found.mean > 0 and found.verdict == NO_GAIN
    same = improvement(SECONDS, draws(3.0, 4.0), draws(3.0, 4.0))
    assert (same.mean, same.low, same.high, same.verdict) == (0.0, 0.0, 0.0, NO_GAIN)


@pytest.mark.parametrize("other", [draws(90.0), draws(90.0, math.inf)], ids=["one draw", "a session without an end"])
def test_what_cannot_be_compared_is_no_gain(other: list[list[Values]]) -> None:
    found = improvement(SECONDS, draws(*[100.0] * len(other)), other)
    assert found.low is None and found.verdict == NO_GAIN


def test_a_gain_that_new_draws_do_not_keep_is_overfitting() -> None:
    def of(mean: float, low: float, high: float) -> Improvement:
        return Improvement(1.0, 1.0, mean, low, high)

    assert overfits(of(0.2, 0.1, 0.3), of(0.02, -0.05, 0.09))
    assert not overfits(of(0.08, 0.0, 0.2), of(0.02, -0.05, 0.09))
    assert not overfits(of(-0.01, -0.1, 0.1), of(-0.3, -0.4, -0.2))


def trial(number: int, *values: float, risk: float = 0.0) -> FrozenTrial:
    of_draw = {"sct_p95_s": values[0], "calls_shed": 0.0, "deadline_risk": risk}
    made = create_trial(values=list(values), user_attrs={DRAWS: [[of_draw]]})
    made.number = number
    return made


def test_the_best_trial_that_holds_the_constraints_is_chosen() -> None:
    task = small_task(constraints=["deadline_risk<=5"])
    assert choose(task, [trial(0, 9.0), trial(1, 3.0, risk=6.0), trial(2, 4.0, risk=5.0), trial(3, 4.0)]).number == 2


def test_where_no_trial_holds_them_the_nearest_is_named() -> None:
    task = small_task(constraints=["deadline_risk<=5"])
    with pytest.raises(InputError, match=r"no trial of 2 .* trial 1 comes nearest and misses deadline_risk<=5 by 2"):
        choose(task, [trial(0, 1.0, risk=9.0), trial(1, 3.0, risk=7.0)])


def test_of_several_objectives_the_front_is_kept_and_its_middle_chosen() -> None:
    task = small_task("tau,instances=1:8", "sct_p95_s,cost")
    trials = [trial(0, 100.0, 1.0), trial(1, 20.0, 2.0), trial(2, 18.0, 8.0), trial(3, 30.0, 3.0), trial(4, 20.0, 2.0)]
    assert [item.number for item in front(task, trials)] == [2, 1, 0]
    assert choose(task, trials).number == 1


def test_validation_runs_both_policies_on_the_draws_it_is_given() -> None:
    task = small_task()
    tuned = {"tau": 0.0, "linger": 0.0}
    with Pool(100, 1) as pool:
        found = validate(task, tuned, (10_000, 10_001), pool)

    def mean(params: Mapping[str, Any]) -> float:
        values: Sequence[float] = [measure(task.replay(task.scenarios[0], params, seed)).values["sct_p95_s"] for seed in found.seeds]
        return sum(values) / len(values)

    whole = found.overall["sct_p95_s"]
    assert (whole.baseline, whole.tuned) == pytest.approx((mean({}), mean(tuned)))
    assert found.by_scenario["small"]["sct_p95_s"] == whole and found.missed == ()


def test_the_baseline_is_what_a_scenario_runs_with_where_nothing_is_tuned() -> None:
    own = {"tau": 3.0, "gamma": 0.8}
    task = replace(small_task("tau,linger", knobs=own), knobs={"linger": 2.0, "gamma": 0.7})
    assert task.settings(task.scenarios[0]) == {"tau": 3.0, "linger": 2.0}
    with Pool(100, 1) as pool:
        found = validate(task, {"tau": 3.0, "linger": 2.0}, (10_000, 10_001), pool)
    whole = found.overall["sct_p95_s"]
    assert whole.baseline == whole.tuned and whole.verdict == NO_GAIN


def test_the_search_begins_where_the_scenarios_agree_and_else_at_the_defaults() -> None:
    one, other = (small_task("tau=0:2,gamma,linger", knobs=knobs) for knobs in ({"tau": 3, "gamma": 0.7}, {"tau": 3, "gamma": 0.8}))
    task = replace(one, scenarios=(*one.scenarios, *other.scenarios))
    assert task.begun().first == {"tau": 2.0, "gamma": 0.9, "linger": 1.5}
    assert one.begun().first == {"tau": 2.0, "gamma": 0.7, "linger": 1.5}
