"""Objectives and constraints: how the values of scenarios and draws become one, and what is refused as impossible."""

from __future__ import annotations

import math

import pytest

from talaria.errors import InputError
from talaria.tune.goals import MOST_VIOLATION, NO_CALL_SHED, Constraint, Objective, parse_constraints, parse_objectives

SECONDS, OPENS, HITS = parse_objectives("sct_p95_s,model_opens,residency_hit")


def test_seconds_of_several_scenarios_weigh_as_ratios() -> None:
    base = SECONDS.combine([[100.0, 300.0], [2.0, 2.0]])
    assert base == pytest.approx(math.sqrt(200.0 * 2.0))
    halved_here, halved_there = SECONDS.combine([[50.0, 150.0], [2.0, 2.0]]), SECONDS.combine([[100.0, 300.0], [1.0, 1.0]])
    assert halved_here == pytest.approx(halved_there)


def test_counts_are_averaged_even_where_there_are_none() -> None:
    assert OPENS.combine([[0.0, 0.0], [4.0, 2.0]]) == 1.5


def test_a_session_without_an_end_in_one_draw_is_no_result_at_all() -> None:
    assert SECONDS.combine([[100.0, math.inf], [2.0, 2.0]]) == math.inf
    assert SECONDS.gain(100.0, math.inf) is None


@pytest.mark.parametrize(("goal", "base", "better"), [(SECONDS, 100.0, 80.0), (OPENS, 7.0, 5.0), (HITS, 0.5, 0.7)])
def test_a_gain_is_positive_on_the_better_side(goal: Objective, base: float, better: float) -> None:
    gain, loss = goal.gain(base, better), goal.gain(better, base)
    assert gain is not None and loss is not None and gain == pytest.approx(-loss) and gain > 0
    assert goal.as_improvement(gain) == pytest.approx(0.2 if goal is SECONDS else abs(base - better))


def test_a_constraint_holds_only_if_it_does_in_every_scenario_by_its_mean() -> None:
    limit = Constraint("deadline_risk", "<=", 10.0)
    assert limit.violation([[8.0, 12.0], [0.0, 0.0]]) == 0.0
    assert limit.violation([[0.0, 0.0], [10.0, 14.0]]) == 2.0
    assert Constraint("residency_hit", ">=", 0.5).violation([[0.4], [0.9]]) == pytest.approx(0.1)
    assert Constraint("lease_hit", ">=", 0.5).violation([[-math.inf]]) == MOST_VIOLATION


def test_no_call_may_be_shed_unless_something_else_is_said_about_it() -> None:
    assert parse_constraints([]) == (NO_CALL_SHED,)
    assert parse_constraints(["calls_shed<=3"]) == (Constraint("calls_shed", "<=", 3.0),)
    assert [str(item) for item in parse_constraints([" deadline_risk <= 1e2 "])] == ["deadline_risk<=100", "calls_shed==0"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["calls_shed<=-1"], "impossible"),
        (["residency_hit>=1.5"], "impossible"),
        (["deadline_risk<=1", "deadline_risk>=2"], "impossible"),
        (["deadline_risk"], "no constraint"),
        (["deadline_risk<=x"], "no constraint"),
        (["deadline_risk<5"], "no constraint"),
        (["deadline_risk<=1e999"], "no constraint"),
        (["deadline_risk<=nan"], "no constraint"),
        (["dedline_risk<=5"], "did you mean 'deadline_risk'"),
    ],
)
def test_a_constraint_that_nothing_can_hold_is_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(InputError, match="--constraint") as raised:
        parse_constraints(texts)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"), [("sct_p96_s", "did you mean 'sct_p95_s'"), ("rounds", "no side"), ("sct_p95_s,sct_p95_s", "each objective once")]
)
def test_an_objective_that_is_none_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match="--objective") as raised:
        parse_objectives(text)
    assert said in str(raised.value)
