"""Rules of other systems: where one and the same return goes under each, and what turns each rule (``policy/peers``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.peers.aegaeon import GROUP_CALLS
from talaria.policy.peers.cache_aware import BALANCE_CALLS
from talaria.policy.peers.continuum import FEWEST_GAPS, best_time_to_live_s
from talaria.policy.router import ROUTERS, Router
from talaria.policy.snapshot import InstanceSnapshot, Residency
from tests.policy.clusters import call, finish, held_line, key, model, routed, router, snapshot

PEERS = ("aegaeon", "serverlessllm", "preble", "mooncake", "continuum", "sglang-cache-aware")
FIRST = call(1, prompt=9_000)
RETURN = call(2, prompt=10_000, reusable=9_000)
"""Of FIRST's line: nine tenths of its prompt were computed before."""


def fleet(**changes: Any) -> list[InstanceSnapshot]:
    """``holder`` has the KV and other work, ``group`` waiting calls of the model, ``active`` the model in its slot, ``idle`` nothing."""
    lines = {key(): held_line(9_100)}
    parked, absent = model(Residency.PARKED, next_slot_s=5.0), model(Residency.ABSENT)
    holder = {"m": parked, "n": model(in_flight=3)}
    group = {"m": replace(parked, queued=changes.get("group", 1), queued_work_s=4.0)}
    return [
        snapshot("holder", holder, round_load_s=5.0, lines=lines, time_s=1.0),
        snapshot("group", group, round_load_s=4.0, time_s=1.0),
        snapshot("active", {"m": model(in_flight=changes.get("active", 1))}, round_load_s=3.0, time_s=1.0),
        snapshot("idle", {"m": absent}, time_s=1.0),
    ]


def served_first_by_holder(name: str, **changes: Any) -> Router:
    """A router that sent FIRST to ``holder``, alone at that time, and learnt of the others after its completion at 0.5 s."""
    alone = snapshot("holder", {"m": model()})
    others = [snapshot(item, {"m": model()}, healthy=False) for item in ("group", "active", "idle")]
    made = router(alone, *others, name=name, tau_s=2.0, lease_charge_s=0.0)
    assert routed(made.place(FIRST, 0.0)).instance == "holder"
    finish(made, FIRST, "holder", 0.5)
    for item in fleet(**changes):
        made.observe(replace(item, version=2, seen_seq=1), 1.0)
    return made


@pytest.mark.parametrize(
    ("name", "instance", "reason"),
    [
        ("aegaeon", "group", "group"),  # a group of its model waits there, one switch serves both
        ("serverlessllm", "active", "startup"),  # the model is active, nothing need be loaded
        ("preble", "holder", "exploit"),  # more of the prompt is cached there than is not
        ("mooncake", "idle", "ttft"),  # no queue: recomputing 9,000 tokens takes less than waiting 3 s
        ("continuum", "holder", "lease"),  # within the KV's time to live
        ("sglang-cache-aware", "holder", "prefix"),  # 90 % of the prompt went there before
    ],
)
def test_one_return_goes_where_each_rule_says(name: str, instance: str, reason: str) -> None:
    placed = routed(served_first_by_holder(name).place(RETURN, 1.0))
    assert (placed.instance, placed.reason) == (instance, reason)


@pytest.mark.parametrize(
    ("name", "instance", "reason"),
    [
        ("aegaeon", "group", "group"), ("serverlessllm", "active", "startup"), ("preble", "group", "explore"),
        ("mooncake", "idle", "ttft"), ("continuum", "idle", "pressure"), ("sglang-cache-aware", "idle", "pressure"),
    ],
)  # fmt: skip
def test_a_new_session_goes_where_each_rule_says(name: str, instance: str, reason: str) -> None:
    placed = routed(served_first_by_holder(name).place(call(3, key("new")), 1.0))
    assert (placed.instance, placed.reason) == (instance, reason)


@pytest.mark.parametrize("name", PEERS)
def test_no_rule_places_a_call_on_an_unhealthy_or_stale_instance(name: str) -> None:
    made = served_first_by_holder(name)
    for instance in ("holder", "group", "active"):
        made.heartbeat(instance, False, 1.0)
    assert routed(made.place(RETURN, 1.0)).instance == "idle"


@pytest.mark.parametrize("name", PEERS)
def test_an_explanation_says_what_the_rule_does_and_looks_at(name: str) -> None:
    made = served_first_by_holder(name)
    why = made.explain(RETURN, 1.0)
    placed = routed(made.place(RETURN, 1.0))
    assert (why.chosen, why.reason) == (placed.instance, placed.reason)
    assert all(candidate.note for candidate in why.candidates)


def test_aegaeon_opens_another_group_where_the_queue_is_shortest_once_a_group_is_full() -> None:
    placed = routed(served_first_by_holder("aegaeon", group=GROUP_CALLS).place(RETURN, 1.0))
    assert (placed.instance, placed.reason) == ("idle", "backlog")


def test_preble_explores_once_the_holder_carries_far_more_than_the_lightest() -> None:
    made = served_first_by_holder("preble")
    for number in range(10, 40):
        if routed(made.place(call(number, prompt=10_000, reusable=9_000), 1.0)).reason == "explore":
            return
    pytest.fail("30 calls in a row went to one instance while others were idle")


def test_preble_explores_where_less_is_cached_than_is_not() -> None:
    assert routed(served_first_by_holder("preble").place(call(2, prompt=20_000, reusable=9_000), 1.0)).reason == "explore"


def test_cache_aware_goes_to_the_idlest_worker_while_loads_are_out_of_balance() -> None:
    placed = routed(served_first_by_holder("sglang-cache-aware", active=BALANCE_CALLS + 1).place(RETURN, 1.0))
    assert (placed.instance, placed.reason) == ("idle", "pressure")


def test_cache_aware_ignores_a_match_below_its_threshold() -> None:
    assert routed(served_first_by_holder("sglang-cache-aware").place(call(2, prompt=40_000, reusable=9_000), 1.0)).reason == "pressure"


def test_continuum_sends_a_return_after_the_time_to_live_to_the_fewest_calls() -> None:
    made = served_first_by_holder("continuum")
    made.poll(3.0)
    assert routed(made.place(RETURN, 3.0)).instance == "idle"


def test_continuum_learns_from_gaps_that_long_tools_are_not_worth_waiting_for() -> None:
    made = router(snapshot("a", {"m": model(queued=50)}), name="continuum", stale_after_s=600.0)
    now_s = 0.0
    for number in range(1, FEWEST_GAPS + 3):
        asked = call(number, prompt=50_000, reusable=49_000 if number > 1 else 0)
        assert routed(made.place(asked, now_s)).instance == "a"
        finish(made, asked, "a", now_s + 1.0)
        now_s += 61.0
        made.poll(now_s)
    granted = made.lease_counts.granted
    asked = call(100, prompt=50_000, reusable=49_000)
    made.place(asked, now_s)
    finish(made, asked, "a", now_s + 1.0)
    assert made.lease_counts.granted == granted, "50 waiting calls for 60 s outweigh a reload"


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12), st.floats(0.0, 50.0), st.floats(0.0, 20.0), st.floats(0.0, 120.0))
def test_no_time_to_live_is_worth_more_than_the_one_chosen(gaps_s: list[float], benefit_s: float, rate: float, other_s: float) -> None:
    def utility(ttl_s: float) -> float:
        hits = sum(gap_s <= ttl_s for gap_s in gaps_s)
        return (hits * benefit_s - rate * sum(min(gap_s, ttl_s) for gap_s in gaps_s)) / len(gaps_s)

    assert utility(best_time_to_live_s(sorted(gaps_s), benefit_s, rate)) >= utility(other_s) - 1e-6


def test_every_peer_is_registered() -> None:
    assert set(PEERS) <= set(ROUTERS)
