"""The next P or SP batch: who is eligible, in which order, and within which limits (SPEC §4.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.batches import Batch, choose, fair_order, is_sp_eligible
from talaria.policy.instance import CallView
from talaria.policy.predict import admission_s
from tests.policy.builders import TIMING, call


def view(number: int, *, prompt: int = 1000, arrived_s: float = 1.0, device: int = 0, host: int = 0, **more: Any) -> CallView:
    return CallView(call(number, prompt=prompt, **more), arrived_s, device, host)


def chosen(items: list[CallView], **limits: Any) -> Batch:
    defaults: dict[str, Any] = {"budget_s": 100.0, "free_kv_tokens": 1_000_000, "room": 100, "output_tokens": 150}
    return choose(items, TIMING, **{**defaults, **limits})


def ids(batch: Batch) -> list[int]:
    return [item.call.id for item in batch.calls]


@pytest.mark.parametrize(
    ("item", "eligible"),
    [
        (view(1, turn=1, device=800), True),
        (view(1, turn=1, host=800), True),
        (view(1, turn=1), False),
        (view(1, device=800), False),
    ],
    ids=["device prefix", "host prefix", "no prefix", "first call"],
)
def test_sp_eligible_is_a_continuation_with_a_prefix_here(item: CallView, eligible: bool) -> None:
    assert is_sp_eligible(item) is eligible


def test_tenants_take_turns_each_in_its_own_order() -> None:
    items = [view(1, tenant="x"), view(2, tenant="x"), view(3, tenant="x"), view(4, tenant="y"), view(5, tenant="z"), view(6, tenant="y")]
    assert [item.call.id for item in fair_order(items)] == [1, 4, 5, 2, 6, 3]


def test_one_tenant_alone_keeps_the_order_of_arrival() -> None:
    items = [view(3), view(1), view(2)]
    assert fair_order(items) == items


@given(st.lists(st.sampled_from("xyz"), max_size=12))
def test_turns_lose_nobody_and_keep_each_tenants_order(tenants: list[str]) -> None:
    items = [view(number, tenant=tenant) for number, tenant in enumerate(tenants)]
    ordered = fair_order(items)
    assert sorted(item.call.id for item in ordered) == list(range(len(items)))
    for tenant in set(tenants):
        own = [item.call.id for item in ordered if item.call.key.tenant == tenant]
        assert own == sorted(own)


def test_a_batch_costs_the_sum_of_its_calls() -> None:
    batch = chosen([view(1), view(2, prompt=2000)])
    assert ids(batch) == [1, 2] and batch.costs_s == pytest.approx((0.2, 0.3)) and batch.cost_s == pytest.approx(0.5)


def test_a_call_too_long_for_the_time_left_is_passed_over() -> None:
    assert ids(chosen([view(1, prompt=20_000), view(2)], budget_s=1.0)) == [2]


def test_a_call_too_large_for_the_memory_left_is_not_overtaken() -> None:
    assert ids(chosen([view(1), view(2, prompt=20_000), view(3)], free_kv_tokens=5000)) == [1]


def test_memory_is_reserved_for_the_output_that_a_grant_can_produce() -> None:
    assert ids(chosen([view(1, output=500), view(2, output=500)], free_kv_tokens=2300)) == [1, 2]  # 1,150 each
    assert ids(chosen([view(1, output=500), view(2, output=500)], free_kv_tokens=2299)) == [1]


def test_a_call_of_unknown_output_reserves_what_is_usual() -> None:
    items = [view(1, output=None), view(2, output=None)]
    assert ids(chosen(items, free_kv_tokens=2 * 2024, output_tokens=10_000)) == [1, 2]
    assert ids(chosen(items, free_kv_tokens=2 * 2024 - 1, output_tokens=10_000)) == [1]


def test_a_batch_holds_no_more_calls_than_there_is_room() -> None:
    assert ids(chosen([view(1), view(2), view(3)], room=2)) == [1, 2] and ids(chosen([view(1)], room=0)) == []


def test_a_call_beyond_the_time_left_goes_alone_only_where_it_comes_first() -> None:
    large, small = view(1, prompt=90_000), view(2)
    assert ids(chosen([large, small], budget_s=1.0, alone_s=5.0)) == [1]
    assert ids(chosen([small, large], budget_s=1.0, alone_s=5.0)) == [2]
    assert ids(chosen([large], budget_s=1.0)) == []


@pytest.mark.parametrize(("alone_s", "oversize"), [(9.2, False), (9.0, True)], ids=["fits an empty slot", "fits none"])
def test_a_call_is_oversize_where_its_own_prefill_fits_no_slot_even_alone(alone_s: float, oversize: bool) -> None:
    batch = chosen([view(1, prompt=90_000)], budget_s=1.0, alone_s=alone_s)  # 9.1 s
    assert ids(batch) == [1] and batch.oversize is oversize


def test_decode_that_others_are_promised_makes_no_call_oversize() -> None:
    timing = replace(TIMING, decode_s_per_context_token=1e-6)
    batch = choose(
        [view(1, prompt=90_000)], timing, budget_s=9.2, free_kv_tokens=1_000_000, room=100, output_tokens=150, decode_steps=90, alone_s=9.2
    )  # 9.1 s, and 8.1 s by which it slows the decode steps
    assert ids(batch) == [1] and not batch.oversize


def test_a_call_within_the_time_left_is_not_oversize() -> None:
    assert not chosen([view(1), view(2)], alone_s=0.1).oversize


def test_with_nothing_in_flight_only_the_engine_can_refuse_a_call_for_its_size() -> None:
    assert ids(chosen([view(1, prompt=9000)], free_kv_tokens=100, empty=True)) == [1]
    assert ids(chosen([view(1, prompt=9000)], free_kv_tokens=100)) == []


@given(st.lists(st.integers(1, 50_000), max_size=10), st.floats(-1, 10), st.integers(0, 200_000), st.integers(0, 12))
def test_a_batch_never_exceeds_time_memory_or_room(prompts: list[int], budget_s: float, free: int, room: int) -> None:
    batch = chosen([view(number, prompt=size) for number, size in enumerate(prompts)], budget_s=budget_s, free_kv_tokens=free, room=room)
    assert batch.cost_s <= max(0.0, budget_s) and len(batch.calls) <= room
    assert sum(item.call.prompt_tokens + 50 for item in batch.calls) <= free
    assert batch.costs_s == tuple(admission_s(TIMING, item) for item in batch.calls)
