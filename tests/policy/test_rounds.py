"""SPEC §4.2 to §4.4: the length of a round, protected decode, the bound, and how a round is shared and ordered."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.instance import CallView, EngineView
from talaria.policy.knobs import Knobs
from talaria.policy.rounds import activation_s, plan_round, protected_steps, round_order, slot_budget_s, step_s
from talaria.policy.snapshot import Residency
from tests.policy.builders import BOUND_S, KNOBS, STEPS, TIMING, call, host, view_of


def waiting(view: EngineView, model: str, *numbers: int, prompt: int = 1000, arrived_s: float = 0.0) -> None:
    for number in numbers:
        view.models[model].waiting[number] = CallView(call(number, model, prompt=prompt), arrived_s)


def busy_view(*names: str, active: str | None = "a", prompt: int = 1000) -> EngineView:
    """Each model has one call that waits; a later model's call came earlier."""
    view = view_of(*names, active=active)
    for number, name in enumerate(names):
        waiting(view, name, number, prompt=prompt, arrived_s=100.0 - number)
    return view


def running(view: EngineView, model: str, *numbers: int) -> None:
    for number in numbers:
        view.models[model].running[number] = CallView(call(number, model), 0.0, generated_tokens=10)


# --- Eq. 4 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("round_s", "t_tpot_s", "steps"), [(9.0, 0.06, 150), (9.0, 0.07, 129), (0.03, 0.06, 1), (6.0, 0.06, 100)])
def test_protected_decode_is_the_round_over_the_tpot_target_rounded_up(round_s: float, t_tpot_s: float, steps: int) -> None:
    assert protected_steps(round_s, t_tpot_s) == steps


@given(round_s=st.floats(0.1, 100), t_tpot_s=st.floats(0.005, 1), share=st.floats(0.01, 0.99))
def test_protected_decode_meets_equation_4_whatever_the_step_time(round_s: float, t_tpot_s: float, share: float) -> None:
    """d·(T_TPOT − t_D) ≥ U with U = R − d·t_D: a sequence that is active all round sees at most T_TPOT per token."""
    steps, step = protected_steps(round_s, t_tpot_s), share * t_tpot_s
    assert steps * (t_tpot_s - step) >= round_s - steps * step - 1e-6


def test_a_decode_step_slower_than_the_tpot_target_is_reported_as_infeasible() -> None:
    view = busy_view("a", "b")
    assert not plan_round(view, ["a", "b"], KNOBS).infeasible
    view.models["b"].timing = replace(TIMING, decode_base_s=KNOBS.t_tpot_s)
    assert plan_round(view, ["a", "b"], KNOBS).infeasible


def test_protected_decode_and_switches_that_pass_the_bound_together_are_infeasible() -> None:
    view = busy_view("a", "b", "c", "d")  # 4 × 150 steps of 20 ms
    assert plan_round(view, list("abcd"), KNOBS).infeasible and not plan_round(view, list("ab"), KNOBS).infeasible


def test_an_infeasible_round_is_reported_as_at_risk() -> None:
    made = host("a", "b", t_tpot_s=0.015)
    made.submit(call(1), call(2, "b"))
    made.run()
    assert all(summary.infeasible and summary.at_risk for summary in made.rounds) and set(made.ended) == {1, 2}


def test_the_step_time_counts_all_calls_in_flight_and_their_context() -> None:
    view = view_of("a", timing=replace(TIMING, decode_s_per_sequence=1e-3, decode_s_per_context_token=1e-6))
    running(view, "a", 1, 2)
    view.models["a"].held[3] = CallView(call(3), 0.0, generated_tokens=5)
    assert step_s(view.models["a"]) == pytest.approx(0.02 + 3e-3 + 1e-6 * (1010 + 1010 + 1005))
    assert step_s(view.models["a"], 2, 4000) == pytest.approx(0.02 + 5e-3 + 1e-6 * (3025 + 4000))


# --- Eq. 3 and 5 ----------------------------------------------------------------------------------------------------------


def test_the_predicted_round_is_prefill_and_protected_decode_and_switches() -> None:
    view = busy_view("a", "b")
    plan = plan_round(view, ["a", "b"], KNOBS)
    assert [slot.switch_s for slot in plan.slots] == [0.0, 2.0]
    assert [slot.protected_steps for slot in plan.slots] == [120, 120]
    assert plan.predicted_s == pytest.approx(2.0 + 2 * (0.2 + 120 * 0.02)) == pytest.approx(120 * KNOBS.t_tpot_s)  # Eq. 4


def test_protected_decode_follows_the_round_that_it_makes_up_to_the_bound() -> None:
    """Longer queues and switches make a longer round and more steps; what decode alone would stretch beyond the bound does not."""
    view = busy_view("a", "b")
    short = plan_round(view, ["a", "b"], KNOBS)
    waiting(view, "a", 7, prompt=9_000)  # 1 s more
    longer = plan_round(view, ["a", "b"], KNOBS)
    assert short.slots[0].protected_steps < longer.slots[0].protected_steps <= math.ceil(longer.predicted_s / KNOBS.t_tpot_s)
    crowded = plan_round(busy_view("a", "b", "c", "d"), list("abcd"), KNOBS)  # decode alone takes 4/3 of any round
    assert crowded.slots[0].protected_steps == math.ceil((6.0 + 0.8 + BOUND_S * 4 * 0.02 / KNOBS.t_tpot_s) / KNOBS.t_tpot_s)


def test_protected_decode_expects_as_much_prefill_as_the_last_round_had() -> None:
    def steps(last_other_s: float) -> int:
        return plan_round(busy_view("a", "b"), ["a", "b"], KNOBS, 0.0, last_other_s).slots[0].protected_steps

    assert steps(0.0) == steps(2.0) < steps(5.0) < steps(20.0) == steps(1000.0)  # one switch, and of each model no more than the bound


def test_a_model_alone_keeps_nobody_waiting() -> None:
    assert plan_round(busy_view("a"), ["a"], KNOBS).slots[0].protected_steps == STEPS


def test_a_switch_is_predicted_from_staging_coverage_and_never_constant() -> None:
    view = view_of("a", "b", "c")
    view.models["b"].coverage = 0.5
    view.models["c"].residency = Residency.ABSENT
    assert [activation_s(view, name) for name in "abc"] == [0.0, pytest.approx(1.1), 30.0]


def test_the_active_model_needs_a_switch_where_others_come_before_it() -> None:
    view = busy_view("a", "b", active="b")
    assert [slot.switch_s for slot in plan_round(view, ["a", "b"], KNOBS).slots] == [2.0, 2.0]


def test_the_bound_is_gamma_times_the_ttft_target() -> None:
    plan = plan_round(busy_view("a"), ["a"], replace(KNOBS, gamma=0.5, t_ttft_s=8.0))
    assert plan.bound_s == plan.length_s == 4.0


def test_an_overrun_shortens_the_next_round_but_leaves_it_a_share() -> None:
    view = busy_view("a")
    assert plan_round(view, ["a"], KNOBS, 3.0).length_s == BOUND_S - 3.0
    assert plan_round(view, ["a"], KNOBS, 100.0).length_s == 0.25 * BOUND_S


def test_work_that_passes_the_bound_is_predicted_and_at_risk_not_hidden_in_later_rounds() -> None:
    made = host("a", "b")
    made.submit(call(9, "b", output=10))
    made.submit(*(call(number, prompt=30_000, output=10) for number in range(1, 6)))  # 15.5 s of prefill
    made.run()
    with_work = next(summary for summary in made.rounds if summary.predicted_s > BOUND_S)
    assert with_work.at_risk


def test_a_prefill_that_overruns_is_charged_to_the_next_round_and_counted() -> None:
    made = host("a", "b")
    made.submit(call(1, prompt=120_000, output=10), call(2, "b", output=10))
    made.run()
    first, second = made.rounds[:2] if len(made.rounds) > 1 else (made.rounds[0], None)
    assert first.overrun_s > 0.0 and first.at_risk
    assert first.overrun_s == pytest.approx(first.ended_s - first.started_s - BOUND_S)
    assert second is None or second.started_s >= first.ended_s


def test_every_round_is_active_plus_switch_exactly() -> None:
    made = host("a", "b", "c")
    for number in range(1, 30):
        made.at(0.4 * number, made.submit, call(number, "abc"[number % 3], output=20 * number))
    made.run()
    assert len(made.rounds) > 2
    for summary in made.rounds:
        active_s = sum(slot.closed_s - slot.opened_s for slot in summary.slots)
        assert summary.ended_s - summary.started_s == pytest.approx(active_s + summary.switch_s)
        assert summary.switch_s == pytest.approx(sum(slot.switch_s for slot in summary.slots))


# --- shares and order ------------------------------------------------------------------------------------------------------


def test_equal_shares_divide_what_switches_leave_among_models_with_work() -> None:
    view = busy_view("a", "b", "c")
    plan = plan_round(view, list("abc"), KNOBS)
    assert slot_budget_s(view, plan, 0, 27.0, KNOBS) == pytest.approx((27.0 - 4.0) / 3)
    view.models["c"].waiting.clear()
    assert slot_budget_s(view, plan, 0, 27.0, KNOBS) == pytest.approx((27.0 - 4.0) / 2)
    assert slot_budget_s(view, plan, 2, 5.0, KNOBS) == 5.0


def test_demand_shares_follow_predicted_work() -> None:
    view, knobs = view_of("a", "b"), replace(KNOBS, round_share="demand")
    waiting(view, "a", 1, 2, 3, prompt=19_000)  # 2 s each
    waiting(view, "b", 4, prompt=29_000)  # 3 s
    plan = plan_round(view, list("ab"), knobs)
    decode_s = plan.slots[0].protected_steps * 0.02
    assert slot_budget_s(view, plan, 0, 22.0, knobs) == pytest.approx(20.0 * (6.0 + decode_s) / (9.0 + 2 * decode_s))


def test_a_slot_keeps_its_protected_decode_even_if_nothing_is_left() -> None:
    view = busy_view("a", "b")
    plan = plan_round(view, list("ab"), KNOBS)
    assert slot_budget_s(view, plan, 0, -5.0, KNOBS) == pytest.approx(plan.slots[0].protected_steps * 0.02)


def order(view: EngineView, *, continuing: bool = False, **knobs: object) -> str:
    return "".join(round_order(view, replace(KNOBS, **knobs), continuing=continuing))  # type: ignore[arg-type]


def test_the_stable_order_is_a_cycle_that_an_idle_instance_enters_at_its_active_model() -> None:
    view = busy_view("a", "b", "c", active="b")
    assert order(view) == "bca" and order(view, continuing=True) == "cab"


def test_the_oldest_order_serves_the_longest_waiting_model_first() -> None:
    assert order(busy_view("a", "b", "c"), round_order="oldest") == "cba"


def test_models_without_work_are_not_visited() -> None:
    view = view_of("a", "b", "c")
    waiting(view, "b", 1)
    assert order(view) == "b" and order(view_of("a", "b")) == ""


def test_visit_idle_visits_opened_models_without_work_too_but_only_beside_work() -> None:
    view = view_of("a", "b", "c", "d")
    view.models["d"].residency = Residency.ABSENT
    assert order(view, visit_idle=True) == ""
    waiting(view, "b", 1)
    assert order(view, visit_idle=True) == "abc"


def test_visit_idle_switches_through_opened_models() -> None:
    made = host("a", "b", "c", visit_idle=True)
    made.submit(call(1, "b"))
    made.run()
    assert {"a", "b", "c"} <= set(made.slots()) and made.ended[1][1] == "completed"


@given(
    st.lists(st.sampled_from("abcd"), max_size=8), st.sampled_from([None, *"abcd"]), st.booleans(), st.sampled_from(["stable", "oldest"])
)
def test_every_model_with_work_has_one_place_in_the_round(work: list[str], active: str | None, continuing: bool, kind: str) -> None:
    view = view_of(*"abcd", active=active)
    for number, name in enumerate(work):
        waiting(view, name, number, arrived_s=float(number))
    assert sorted(round_order(view, Knobs(round_order=kind), continuing=continuing)) == sorted(set(work))
