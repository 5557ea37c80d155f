"""SPEC §4.1, rule by rule: what P, SP, decode, linger and the end of a slot do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from talaria.policy.instance import Admit, CallView, Resume, Switch, SwitchDone, Tick
from talaria.policy.slots import SlotScheduler
from talaria.policy.snapshot import Capabilities
from tests.policy.builders import BOUND_S, KNOBS, STEPS, TIMING, ModelHost, call, decoding, host, view_of


def back(number: int, *, cached: ModelHost, session: str = "r", prompt: int = 1000, model: str = "a", **more: Any) -> None:
    """A return whose prefix the host knows arrives."""
    item = call(number, model, session=session, turn=1, prompt=prompt, **more)
    cached.cache(item.key, item.reusable_tokens)
    cached.submit(item)


# --- P ------------------------------------------------------------------------------------------------------------------


def test_p_admits_all_that_waits_when_the_slot_opens() -> None:
    made = host("a", "b", active="b")
    made.submit(call(1), call(2), call(3, turn=1))
    made.run()
    assert made.batches("P") == [(1, 2, 3)] and made.batches("SP") == []


def test_what_p_cannot_fit_waits_for_a_later_slot() -> None:
    made = host("a", "b", active="b")
    made.submit(*(call(number, prompt=30_000) for number in range(1, 5)))  # 3.1 s each; 9 s less protected decode hold one
    made.run()
    assert made.batches("P") == [(1,), (2,), (3,), (4,)]


def test_protected_decode_is_reserved_before_p() -> None:
    made = host("a", "b", active="b", t_ttft_s=10.0, t_tpot_s=0.03)
    made.submit(call(1, prompt=25_000), call(2, prompt=25_000))  # 5.2 s would fit the 9 s but for 300 steps of 20 ms
    made.run()
    assert made.batches("P") == [(1,), (2,)]


@pytest.mark.parametrize(("active", "inflight_kv", "admits"), [("a", "swap", True), ("b", "swap", False), ("b", "recompute", False)])
def test_p_pays_for_the_way_back_of_in_flight_kv_only_after_a_switch(active: str, inflight_kv: str, admits: bool) -> None:
    timing = replace(TIMING, swap_s_per_token=1e-4, prefill_s_per_token=1e-4)
    view = view_of("a", "b", active=active, capabilities=Capabilities(inflight_kv=inflight_kv), timing=timing)
    view.models["a"].held[1] = CallView(call(1, prompt=50_000), 0.0, generated_tokens=10)  # 5 s to bring back
    view.models["a"].waiting[2] = CallView(call(2, prompt=4_000), 0.0)
    view.models["a"].waiting[3] = CallView(call(3, prompt=15_000), 0.0)  # 2.1 s in all
    scheduler = SlotScheduler(KNOBS)
    commands = scheduler.step(Tick(), view, 0.0)
    if active == "b":
        view.active = "a"
        commands = scheduler.step(SwitchDone("a", (2.0,), "h2d"), view, 2.0)
    admitted = {call_id for command in commands if isinstance(command, Admit) for call_id, _ in command.batch}
    assert (admitted == {2, 3}) == admits and 2 in admitted


def test_grants_are_the_protected_steps() -> None:
    made = host("a", "b", active="b")
    made.submit(call(1))
    made.run()
    assert made.commanded(Admit)[0].batch == ((1, STEPS),)


def test_in_flight_calls_resume_before_p_admits() -> None:
    made = decoding("a", "b", linger_s=0.0)
    made.submit(call(2, "b"), call(3, session="new"))
    made.run()
    resumed = next(step for step in made.done if any(isinstance(command, Resume) for command in step.commands))
    steps = math.ceil((4.0 + 0.4 + BOUND_S * 2 * 0.02 / KNOBS.t_tpot_s) / KNOBS.t_tpot_s)  # two switches, two prefills, decode of both
    assert [command for command in resumed.commands if isinstance(command, Resume | Admit)] == [
        Resume(((1, steps),)),
        Admit("P", ((3, steps),)),
    ]


def test_a_call_that_fits_no_slot_alone_gets_its_own_and_is_flagged() -> None:
    made = host("a", "b")
    made.submit(call(1, prompt=200_000), call(2))  # 20.1 s
    made.run()
    assert made.batches("P")[0] == (1,)
    assert made.rounds[0].slots[0].oversize == 1 and made.rounds[0].at_risk


def test_a_prefill_that_fits_no_slot_leaves_its_slot_the_time_for_returns() -> None:
    """It is charged to the next round (SPEC §4.1): the return of its session joins the slot as after any other P."""
    made = host("a", "b")
    made.submit(call(1, prompt=200_000, output=10), call(9, "b", output=10))  # 20.1 s
    made.run(20.2)  # in its first decode, long after a slot of 9 s
    back(2, cached=made)
    made.run()
    assert made.batches("SP") == [(2,)] and made.rounds[0].slots[0].oversize == made.rounds[0].slots[0].sp_admitted == 1


def test_a_refused_prefill_that_fits_no_slot_gives_its_time_back() -> None:
    made = host("a", "b", refusals=1)
    made.submit(call(1, prompt=200_000, output=10))
    made.run(0.1)
    back(2, cached=made, output=2000)
    made.run(15.0)
    assert made.rounds[0].slots[0].closed_s <= BOUND_S


def test_a_return_that_is_refused_behind_a_prefill_that_fits_no_slot_does_not_end_the_slot() -> None:
    made = host("a", "b")
    made.submit(call(1, prompt=200_000, output=10), call(9, "b", output=10))  # 20.1 s
    made.run(20.2)
    made.refusals = 1
    back(2, cached=made)
    made.run(20.3)
    back(3, cached=made, session="s")
    made.run()
    slot = made.rounds[0].slots[0]
    assert (made.refusals, slot.oversize, slot.sp_admitted, slot.sp_batches) == (0, 1, 2, 3)


def test_a_call_that_would_fit_an_empty_slot_goes_alone_unflagged() -> None:
    made = host("a", timing=replace(TIMING, decode_s_per_context_token=2e-7))
    made.submit(call(1, prompt=50_000, output=400))
    made.run(6.0)
    made.submit(call(2, prompt=35_000), call(3))  # 3.6 s, and 1 s by which it slows decode; 9 s less 150 steps of call 1 hold 4.5 s
    made.run()
    assert made.batches("P") == [(1,), (2,), (3,)]
    assert not any(slot.oversize for summary in made.rounds for slot in summary.slots)


def test_no_more_calls_run_than_the_engine_holds() -> None:
    made = host("a", max_running=2)
    made.submit(*(call(number) for number in range(1, 6)))
    made.run()
    assert all(len(batch) <= 2 for batch in made.batches("P")) and set(made.ended) == set(range(1, 6))


# --- SP -----------------------------------------------------------------------------------------------------------------


def test_a_return_that_arrives_after_p_is_admitted_by_sp_at_once() -> None:
    made = decoding("a", "b")
    back(2, cached=made)
    assert made.batches("SP") == [(2,)] and made.admitted_at(2) == made.now_s
    made.run()
    assert made.rounds[0].slots[0].sp_admitted == 1 and made.rounds[0].slots[0].parked == 0


def test_a_new_session_never_bypasses_p_through_sp() -> None:
    made = decoding("a", "b")
    made.submit(call(3, "b"), call(2))
    made.run()
    assert made.batches("SP") == [] and made.batches("P") == [(1,), (3,), (2,)]


def test_a_return_without_a_prefix_here_never_bypasses_p() -> None:
    made = decoding("a", "b")
    made.submit(call(3, "b"), call(2, turn=1))
    made.run()
    assert made.batches("SP") == [] and 2 in made.ended


def test_a_return_of_another_model_waits_for_its_own_slot() -> None:
    made = decoding("a", "b")
    back(2, cached=made, model="b")
    made.run()
    assert made.batches("SP") == [] and made.batches("P") == [(1,), (2,)]


def test_a_host_resident_prefix_makes_a_return_eligible() -> None:
    made = decoding("a", "b")
    item = call(2, session="r", turn=1)
    made.cache(item.key, 800, on_host=True)
    made.submit(item)
    assert made.view.models["a"].running[2].host_tokens == 800 and made.batches("SP") == [(2,)]


def test_sp_waits_for_the_boundary_at_which_the_batch_in_prefill_is_done() -> None:
    made = host("a", "b")
    made.submit(call(1, prompt=20_000, output=500))
    made.run(1.0)
    back(2, cached=made)
    assert made.batches("SP") == []
    made.run()
    assert made.batches("SP") == [(2,)] and made.admitted_at(2) == made.first_token_s[1]


def test_a_batch_fits_what_is_left_after_the_decode_already_promised() -> None:
    made = decoding("a", "b")  # 150 protected steps end at 3.2 s; the lone slot of the round ends at 9 s
    for number, prompt in ((2, 20_000), (3, 60_000)):
        item = call(number, session=f"r{number}", turn=1, prompt=prompt, reusable=100)
        made.cache(item.key, 100)
        made.submit(item)
        made.run(made.first_token_s.get(2, 0.0) + 3.0)
    assert made.batches("SP") == [(2,)]
    made.run()
    assert made.rounds[0].slots[0].parked_calls == (3,) and 3 in made.ended


def test_a_large_return_does_not_stop_a_smaller_one_behind_it() -> None:
    made = host("a", "b")
    made.submit(call(1, prompt=20_000, output=500))
    made.run(1.0)
    for number, prompt in ((2, 90_000), (3, 1000)):
        item = call(number, session=f"r{number}", turn=1, prompt=prompt, reusable=100)
        made.cache(item.key, 100)
        made.submit(item)
    made.run(2.2)
    assert made.batches("SP") == [(3,)]


@pytest.mark.parametrize(("order", "first"), [("fifo", 2), ("cheapest", 3)])
def test_sp_order_says_which_eligible_call_goes_first(order: str, first: int) -> None:
    made = host("a", "b", sp_order=order)
    made.submit(call(1, prompt=20_000, output=500))
    made.run(1.0)
    for number, prompt in ((2, 30_000), (3, 20_000)):  # either fits, not both
        item = call(number, session=f"r{number}", turn=1, prompt=prompt, reusable=100)
        made.cache(item.key, 100)
        made.submit(item)
    made.run(2.2)
    assert made.batches("SP") == [(first,)]


def test_a_refused_sp_call_was_not_admitted_and_is_parked() -> None:
    made = decoding("a", "b", output=100)
    made.submit(call(3, "b"))
    made.refusals = 2
    back(2, cached=made)
    made.run()
    slot = made.rounds[0].slots[0]
    assert (slot.sp_admitted, slot.parked_calls) == (0, (2,)) and made.ended[2][1] == "completed"


def test_a_return_that_p_could_not_fit_is_not_let_in_by_sp() -> None:
    made = host("a", "b", active="b")
    items = [call(number, session=f"r{number}", turn=1, prompt=30_000, reusable=100) for number in (1, 2)]
    for item in items:
        made.cache(item.key, 100)
    made.submit(*items, call(3, "b", output=3000))  # one return fits the slot, beside b's share of the round
    made.run(5.0)
    assert made.batches("P")[0] == (1,) and made.batches("SP") == []


def test_a_call_that_comes_in_the_instant_in_which_p_was_formed_is_served_like_any_later_one() -> None:
    made = host("a", "b")
    made.submit(call(1, output=1000), call(2))
    item = call(3, session="r", turn=1)
    made.cache(item.key, 800)
    made.submit(item)
    made.run()
    assert made.batches("SP") == [(3,)] and made.first_token_s[2] < made.ended[1][0]


# --- handling events ------------------------------------------------------------------------------------------------------


def test_with_sp_off_every_waiting_return_is_parked() -> None:
    made = decoding("a", "b", session_prefill=False)
    made.submit(call(5, "b"))
    for number in (2, 3, 4):
        back(number, cached=made, session=f"r{number}")
    made.run()
    assert made.batches("SP") == [] and made.rounds[0].slots[0].parked_calls == (2, 3, 4)
    assert sum(slot.sp_admitted for summary in made.rounds for slot in summary.slots) == 0


def test_a_return_can_be_parked_in_several_rounds() -> None:
    made = decoding("a", "b", output=100, session_prefill=False)
    made.submit(call(9, "b", output=4000))
    made.run(0.5)
    made.submit(*(call(number, turn=1, prompt=30_000, reusable=100) for number in (2, 3, 4)))  # one fits a slot
    made.run()
    assert [slot.parked_calls for summary in made.rounds for slot in summary.slots if slot.parked] == [(2, 3, 4), (3, 4), (4,)]


def test_a_first_call_that_waits_is_no_handling_event() -> None:
    made = decoding("a", "b")
    made.submit(call(9, "b"), call(2))
    made.run()
    assert sum(slot.parked for summary in made.rounds for slot in summary.slots) == 0


# --- decode, linger, and the one closing rule -----------------------------------------------------------------------------


def test_a_slot_ends_when_its_protected_steps_have_run_and_nothing_is_expected() -> None:
    made = decoding("a", "b", output=5000, linger_s=0.0)
    made.submit(call(2, "b"))
    made.run(4.0)
    switch_s = next(step.now_s for step in made.done if any(isinstance(command, Switch) for command in step.commands))
    assert switch_s == pytest.approx(0.2 + STEPS * 0.02)


def test_a_slot_ends_at_once_when_its_last_call_completes_and_no_lease_is_live() -> None:
    made = decoding("a", "b", output=50)
    made.submit(call(2, "b"))
    made.run()
    assert made.rounds[0].slots[0].linger_s == 0.0 and made.rounds[0].slots[0].closed_s == pytest.approx(made.ended[1][0])


@pytest.mark.parametrize(("lease_s", "linger_s", "lingers_s"), [(1.0, 1.5, 1.0), (5.0, 1.5, 1.5), (5.0, 0.0, 0.0), (0.0, 1.5, 0.0)])
def test_a_slot_lingers_only_while_a_live_lease_is_younger_than_linger(lease_s: float, linger_s: float, lingers_s: float) -> None:
    made = decoding("a", "b", output=50, linger_s=linger_s, lease_s=lease_s)
    made.submit(call(2, "b"))
    made.run()
    assert made.rounds[0].slots[0].linger_s == pytest.approx(lingers_s)


def test_linger_ends_with_the_lease() -> None:
    made = decoding("a", "b", output=50, lease_s=5.0)
    made.submit(call(2, "b"))
    made.run(made.now_s + 1.2)
    (ended_s, _), key = made.ended[1], call(1).key
    made.lease(key, None)
    made.run()
    assert made.rounds[0].slots[0].closed_s < ended_s + 1.0


def test_a_return_during_linger_is_admitted_in_the_same_slot() -> None:
    made = decoding("a", "b", output=50, lease_s=5.0)
    made.submit(call(2, "b"))
    made.run(1.8)
    made.submit(call(3, session="s1", turn=1, prompt=1250, reusable=1050))
    assert made.batches("SP") == [(3,)]
    made.run()
    assert made.slots()[:2] == ["a", "b"]


def test_the_lease_of_another_model_does_not_make_a_slot_linger() -> None:
    made = decoding("a", "b", output=50)
    made.lease(call(9, "b").key, 5.0)
    made.submit(call(2, "b"))
    made.run()
    assert made.rounds[0].slots[0].linger_s == 0.0


def test_without_sp_there_is_no_linger_and_nothing_else_changes() -> None:
    """A workload without returns and leases runs the same either way."""

    def commands(session_prefill: bool) -> list[object]:
        made = host("a", "b", "c", session_prefill=session_prefill, linger_s=0.0)
        for number in range(1, 10):
            made.at(0.7 * number, made.submit, call(number, "abc"[number % 3], output=40 * number))
        made.run()
        return [(step.now_s, step.event, step.commands) for step in made.done]

    assert commands(True) == commands(False)


def test_decode_goes_on_while_calls_are_in_flight_and_the_slot_has_time_left() -> None:
    made = decoding("a", "b", output=200)  # 150 steps are granted; the other 50 take one second more
    made.submit(call(2, "b"))
    made.run()
    assert made.slots() == ["a", "b"] and made.ended[1][0] < made.first_token_s[2]


def test_a_slot_serves_the_same_model_again_without_a_switch_where_no_other_has_work() -> None:
    made = decoding("a", "b", output=1000)
    made.submit(call(2))
    made.run()
    assert made.commanded(Switch) == [] and made.admitted_at(2) < made.ended[1][0]


# --- bounded wait and fairness --------------------------------------------------------------------------------------------


def test_one_greedy_tenant_cannot_push_back_another() -> None:
    made = host("a", "b", active="b")
    made.submit(*(call(number, prompt=10_000, tenant="greedy") for number in range(1, 9)), call(9, prompt=10_000, tenant="modest"))
    made.run()
    assert 9 in made.batches("P")[0]


def test_one_greedy_tenant_cannot_push_back_another_in_sp() -> None:
    made = host("a", "b")
    made.submit(call(1, prompt=20_000, output=500))
    made.run(1.0)
    for number in range(2, 9):
        tenant = "modest" if number == 8 else "greedy"
        item = call(number, session=f"r{number}", turn=1, prompt=12_000, reusable=100, tenant=tenant)
        made.cache(item.key, 100)
        made.submit(item)
    made.run(2.2)
    assert 8 in made.batches("SP")[0] and len(made.batches("SP")[0]) < 7


def returning_all_the_time(made: ModelHost, until_s: float) -> None:
    """Sessions of model a come back every 150 ms, always into the open slot."""
    number = 100
    time_s = 0.3
    while time_s < until_s:
        item = call(number, session=f"r{number}", turn=1, prompt=4000)
        made.cache(item.key, item.reusable_tokens)
        made.at(time_s, made.submit, item)
        number, time_s = number + 1, time_s + 0.15


@pytest.mark.parametrize("limit", [1, 3])
def test_a_call_goes_before_returns_and_linger_after_so_many_rounds(limit: int) -> None:
    made = host("a", "b", max_wait_rounds=limit, t_ttft_s=4.0)
    returning_all_the_time(made, 40.0)
    made.at(0.2, made.submit, call(1, output=400))
    made.at(0.35, made.submit, call(2, "b"), call(3))
    made.run()
    opened_before = [summary for summary in made.rounds if summary.started_s < made.first_token_s[3]]
    assert len(opened_before) <= limit + 2
