"""Overload: queue with bound, deadline and fairness; shed with a reason; spill (SPEC §3.2, step 3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.calls import Call
from talaria.policy.overload import CallQueue, Overloaded
from talaria.policy.router import ROUTERS, Router
from talaria.policy.snapshot import Residency
from tests.policy.clusters import call, key, model, routed, router, snapshot


def full_round(name: str, wait_s: float = 1.0, version: int = 1, **changes: object) -> object:
    return snapshot(name, {"m": model(queued=1, queued_work_s=wait_s)}, version, round_load_s=9.0, **changes)


def overloaded(**knobs: object) -> Router:
    return router(full_round("a"), **knobs)


def of_tenant(number: int, tenant: str, model_name: str = "m", **changes: object) -> Call:
    return call(number, key(f"s{number}", model_name, tenant=tenant), **changes)


def test_shed_refuses_with_a_reason() -> None:
    answer = overloaded(overload="shed").place(call(1), 0.0)
    assert answer == Overloaded(1, "shed", "no instance can take a call of model 'm' within its round, memory and replica limits")


def test_spill_takes_the_least_cost_regardless_of_the_checks() -> None:
    placed = routed(router(full_round("a", 2.0), full_round("b", 1.0), overload="spill").place(call(1), 0.0))
    assert (placed.instance, placed.reason) == ("b", "spill")


def test_spill_without_fresh_telemetry_takes_a_healthy_instance() -> None:
    made = router(full_round("a", 1.0), full_round("b", 2.0), overload="spill")
    made.heartbeat("a", False, 50.0)
    assert routed(made.place(call(1), 50.0)).instance == "b"


def test_spill_without_a_healthy_instance_queues() -> None:
    made = overloaded(overload="spill")
    made.heartbeat("a", False, 1.0)
    answer = made.place(call(1), 1.0)
    assert isinstance(answer, Overloaded) and answer.action == "queue" and "no healthy instance" in answer.reason
    made.observe(full_round("a", version=2), 2.0)
    assert [routed(item).reason for item in made.poll(2.0)] == ["queue"]


@pytest.mark.parametrize("name", list(ROUTERS))
@pytest.mark.parametrize("overload", ["queue", "shed", "spill"])
def test_a_model_that_no_instance_serves_is_shed_at_once(name: str, overload: str) -> None:
    answer = router(full_round("a"), name=name, overload=overload).place(call(1, key(model_name="unknown")), 0.0)
    assert answer == Overloaded(1, "shed", "no instance serves model 'unknown'")


def test_a_queued_call_is_placed_when_a_snapshot_shows_room() -> None:
    made = overloaded(overload="queue")
    assert isinstance(made.place(call(1), 0.0), Overloaded)
    assert made.poll(0.5) == []
    made.observe(snapshot("a", {"m": model()}, 2, 1.0), 1.0)
    assert made.next_poll_s() == 1.0
    (placed,) = made.poll(1.0)
    assert (routed(placed).reason, routed(placed).instance) == ("queue", "a")
    assert made.next_poll_s() is None


def test_a_queued_call_is_shed_at_its_deadline() -> None:
    made = overloaded(overload="queue", queue_deadline_s=3.0)
    made.place(call(1), 1.0)
    assert made.next_poll_s() == 4.0
    assert made.poll(3.999) == []
    (answer,) = made.poll(4.0)
    assert isinstance(answer, Overloaded) and answer.action == "shed" and "deadline at 4.000 s" in answer.reason


def test_a_call_s_own_deadline_comes_first_where_it_is_earlier() -> None:
    made = overloaded(overload="queue", queue_deadline_s=60.0)
    made.place(call(1, deadline_s=2.5), 1.0)
    assert made.next_poll_s() == 2.5


def test_a_full_queue_sheds_the_newest_call_of_the_tenant_with_the_most() -> None:
    made = overloaded(overload="queue", queue_limit=3)
    for number in (1, 2, 3):
        made.place(of_tenant(number, "greedy"), 0.0)
    answer = made.place(of_tenant(4, "modest"), 0.1)
    assert isinstance(answer, Overloaded) and (answer.call_id, answer.action) == (4, "queue")
    assert made.next_poll_s() == 0.1
    (answer,) = made.poll(0.2)
    assert isinstance(answer, Overloaded) and (answer.call_id, answer.action) == (3, "shed")


def test_a_withdrawn_call_leaves_at_once_and_lets_those_behind_it_by() -> None:
    made = router(snapshot("a", {"m": model(free_kv_tokens=2000)}), overload="queue", queue_limit=2)
    huge, small = call(1, prompt=10_000_000), call(2, prompt=100)
    made.heartbeat("a", False, 0.5)
    assert [made.place(each, 1.0).call_id for each in (huge, small)] == [1, 2]
    assert made.withdraw(huge, 2.0) and made.next_poll_s() == 2.0
    assert not made.withdraw(huge, 2.0), "it has left"
    third = made.place(call(3), 2.0)
    assert isinstance(third, Overloaded) and third.action == "queue", "its place is free"
    made.observe(snapshot("a", {"m": model()}, 2, 3.0), 3.0)
    assert [routed(answer).call_id for answer in made.poll(3.0)] == [2, 3]
    assert not made.withdraw(small, 4.0) and made.poll(200.0) == []


def test_a_queue_of_no_length_sheds_the_call_itself() -> None:
    answer = overloaded(overload="queue", queue_limit=0).place(call(1), 0.0)
    assert isinstance(answer, Overloaded) and (answer.action, answer.call_id) == ("shed", 1)


def test_a_greedy_tenant_cannot_starve_another() -> None:
    queue = CallQueue(100, 60.0)
    for number in range(10):
        queue.join(of_tenant(number, "greedy"), 0.0)
    for number in range(10, 13):
        queue.join(of_tenant(number, "modest"), 1.0)
    taken: list[int] = []

    def take(offered: Call) -> bool:
        if len(taken) == 6:
            return False
        taken.append(offered.id)
        return True

    queue.serve(take)
    assert taken == [0, 10, 1, 11, 2, 12]


def test_a_refused_call_holds_back_its_tenant_s_later_calls_of_that_model_only() -> None:
    queue = CallQueue(100, 60.0)
    for number, name in enumerate(["m", "m", "n"]):
        queue.join(of_tenant(number, "t", name, prompt=1000 if number else 9000), 0.0)
    offered: list[int] = []

    def take(asked: Call) -> bool:
        offered.append(asked.id)
        return asked.prompt_tokens == 1000

    queue.serve(take)
    assert offered == [0, 2]


@given(st.lists(st.tuples(st.sampled_from("tuv"), st.sampled_from("mn"), st.floats(0, 5)), max_size=40), st.integers(0, 8))
def test_every_call_that_joins_is_taken_or_shed_exactly_once(joins: list[tuple[str, str, float]], limit: int) -> None:
    queue = CallQueue(limit, deadline_s=2.0)
    gone: list[int] = []
    for number, (tenant, name, delta_s) in enumerate(joins):
        now_s = number + delta_s
        shed = queue.join(of_tenant(number, tenant, name), now_s)
        gone += [shed.call_id] if shed else []
        assert len(queue) <= limit
        assert queue.queued_of("m") + queue.queued_of("n") == len(queue)
        gone += [item.call_id for item in queue.expire(now_s - 1.0)]

    def take(offered: Call) -> bool:
        if offered.id % 3 == 0:
            return False
        gone.append(offered.id)
        return True

    queue.serve(take)
    gone += [item.call_id for item in queue.expire(1e9)]
    assert sorted(gone) == list(range(len(joins)))
    assert len(queue) == 0 and queue.next_deadline_s() is None


def test_spilled_calls_count_as_demand_for_a_replica() -> None:
    """Each spill to the holder raises the gain until opening the idle instance pays."""
    holder = snapshot("a", {"m": model(in_flight=1, queued=1, queued_work_s=1.0)}, round_load_s=9.0)
    far = snapshot("b", {"m": model(Residency.ABSENT, activate_s=6.0)})
    made = router(holder, far, nu_s=0.0, overload="spill")
    reasons = [routed(made.place(call(n, key(f"s{n}"), prompt=10), 0.0)) for n in range(6)]
    assert (reasons[0].reason, reasons[0].instance) == ("spill", "a")
    assert (reasons[-1].instance, reasons[-1].reason) == ("b", "cost")
