"""Eq. 1: three terms in seconds, each effect charged once; the vector price equals the scalar one (SPEC §3.3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.calls import Call
from talaria.policy.cost import CostTerms, Pricer
from talaria.policy.fleet import Fleet
from talaria.policy.knobs import Knobs
from talaria.policy.overlay import Overlay
from talaria.policy.router import Router
from talaria.policy.sessions import SessionTable
from talaria.policy.snapshot import Capabilities, ModelSnapshot, Residency, Tier
from talaria.policy.timing import Timing
from tests.policy.clusters import TIMING, call, finish, held_line, key, model, routed, router, snapshot


def terms_of(made: Router, asked: Call, now_s: float = 0.0, at: int = 0) -> CostTerms:
    terms = made.explain(asked, now_s).candidates[at].terms
    assert terms is not None
    return terms


def terms_on(item: ModelSnapshot, asked: Call, now_s: float = 0.0, **changes: object) -> CostTerms:
    return terms_of(router(snapshot("a", {"m": item}, **changes)), asked, now_s)


RETURN = call(2, prompt=1300, reusable=1100)


def terms_of_return(item: ModelSnapshot, tier: Tier, tokens: int = 1100, **capabilities: bool) -> CostTerms:
    """The return's terms after its line was served on the only instance, which now reports the prefix so."""
    made = router(snapshot("a", {"m": item}, capabilities=Capabilities(**capabilities)), tau_s=0.0)
    finish(made, call(1), "a", 0.5)
    lines = {key(): held_line(tokens, tier)}
    made.observe(snapshot("a", {"m": item}, 2, 1.0, lines=lines, capabilities=Capabilities(**capabilities)), 1.0)
    return terms_of(made, RETURN, 1.0)


def test_the_wait_is_the_next_slot_aged_by_the_snapshot_plus_the_queued_work() -> None:
    busy = model(Residency.PARKED, next_slot_s=3.0, queued_work_s=0.5)
    assert terms_on(busy, call(1), now_s=1.0).wait_s == pytest.approx(2.5)
    assert terms_on(busy, call(1), now_s=4.0).wait_s == pytest.approx(0.5)


def test_an_eligible_return_to_the_active_model_waits_only_for_queued_work() -> None:
    active = model(next_slot_s=3.0, queued_work_s=0.5)
    assert terms_of_return(active, Tier.DEVICE).wait_s == pytest.approx(0.5)
    assert terms_of_return(active, Tier.HOST).wait_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("item", "tier", "capabilities"),
    [
        (model(Residency.PARKED, next_slot_s=3.0), Tier.DEVICE, {}),
        (model(next_slot_s=3.0), Tier.MISSING, {}),
        (model(next_slot_s=3.0), Tier.DEVICE, {"session_prefill": False}),
    ],
    ids=["model not active", "prefix missing", "no session-prefill"],
)
def test_a_return_that_is_not_eligible_waits_for_the_next_slot(item: ModelSnapshot, tier: Tier, capabilities: dict[str, bool]) -> None:
    assert terms_of_return(item, tier, **capabilities).wait_s == pytest.approx(3.0)


def test_a_new_session_never_bypasses_the_next_slot() -> None:
    assert terms_on(model(next_slot_s=3.0), call(1)).wait_s == pytest.approx(3.0)


def test_kv_on_the_device_costs_nothing() -> None:
    assert terms_of_return(model(), Tier.DEVICE).kv_s == 0.0


def test_kv_on_the_host_costs_its_restore() -> None:
    assert terms_of_return(model(), Tier.HOST).kv_s == pytest.approx(TIMING.restore_s(1100))


def test_missing_kv_costs_its_recomputation_beside_the_prefill_of_the_suffix() -> None:
    terms = terms_of_return(model(), Tier.MISSING)
    assert terms.prefill_s == pytest.approx(TIMING.prefill_s(200, 1100))
    assert terms.prefill_s + terms.kv_s == pytest.approx(TIMING.prefill_s(200, 0, 1100))


def test_the_part_of_a_prefix_that_is_not_held_is_recomputed() -> None:
    terms = terms_of_return(model(), Tier.HOST, tokens=600)
    recompute_s = TIMING.prefill_s(200, 600, 500) - TIMING.prefill_s(200, 1100)
    assert terms.kv_s == pytest.approx(TIMING.restore_s(600) + recompute_s)


@pytest.mark.parametrize(
    ("residency", "seconds"), [(Residency.ACTIVE, 0.0), (Residency.STAGED, 0.5), (Residency.PARKED, 2.0), (Residency.ABSENT, 30.0)]
)
def test_activation_is_the_advertised_switch_or_open_and_nothing_else_pays_for_it(residency: Residency, seconds: float) -> None:
    terms = terms_on(model(residency), call(1))
    active = terms_on(model(), call(1))
    assert terms.activate_s == seconds
    assert terms.request_s == active.request_s and terms.kv_s == active.kv_s


def test_the_placement_reports_the_terms_that_add_up_to_its_cost() -> None:
    placed = routed(router(snapshot("a", {"m": model(Residency.PARKED, next_slot_s=1.0)})).place(RETURN, 0.0))
    assert placed.cost_s == pytest.approx(placed.request_s + placed.kv_s + placed.activate_s)


def test_a_prefix_that_a_completion_has_just_left_behind_counts_before_any_snapshot_shows_it() -> None:
    made = router(snapshot("a", {"m": model()}), tau_s=0.0)
    finish(made, call(1), "a", 1.0)
    assert terms_of(made, RETURN, 1.1).kv_s == 0.0


def test_the_expected_output_is_learned_per_model_where_the_call_does_not_say() -> None:
    made = router(snapshot("a", {"m": model()}), ewma_alpha=0.5)
    unknown = replace(call(9, key("new")), expected_output_tokens=None)
    for number, output in enumerate((100, 300)):
        finish(made, call(number, key(f"s{number}")), "a", 1.0, output)
    expected = replace(unknown, expected_output_tokens=200)
    assert terms_of(made, unknown, 9.0).decode_s == pytest.approx(terms_of(made, expected, 9.0).decode_s)


seconds = st.floats(0.0, 20.0)
timings = st.builds(
    Timing, prefill_base_s=st.floats(0, 1), prefill_s_per_token=st.floats(0, 1e-3), prefill_s_per_token2=st.floats(0, 1e-8),
    decode_base_s=st.floats(0, 0.1), decode_s_per_sequence=st.floats(0, 1e-2), decode_s_per_context_token=st.floats(0, 1e-7),
    restore_base_s=st.floats(0, 0.1), restore_s_per_token=st.floats(0, 1e-5), swap_s_per_token=st.just(0.0),
    d2d_switch_s=st.just(0.1), h2d_switch_s=st.just(2.0), open_s=st.just(30.0),
    recompute_base_s=st.floats(0, 3), recompute_s_per_token=st.sampled_from([0.0, 1e-4]),
)  # fmt: skip
models = st.builds(
    model, st.sampled_from(Residency), queued=st.integers(0, 3), in_flight=st.integers(0, 5), queued_work_s=seconds, next_slot_s=seconds,
    timing=timings,
)  # fmt: skip
calls = st.builds(
    lambda prompt, share, output: replace(call(7, key("new"), prompt, int(prompt * share)), expected_output_tokens=output),
    st.integers(1, 200_000), st.sampled_from([0.0, 0.5, 0.97, 1.0]), st.integers(1, 8192),
)  # fmt: skip


@given(st.lists(models, min_size=1, max_size=5), calls, seconds)
def test_the_vector_price_equals_the_scalar_price_on_every_instance(items: list[ModelSnapshot], asked: Call, now_s: float) -> None:
    instances = {f"i{n}": Capabilities() for n in range(len(items))}
    fleet = Fleet(instances, Knobs(), {}, Overlay(instances, 0.25))
    for name, item in zip(instances, items, strict=True):
        fleet.observe(snapshot(name, {"m": item}), 0.0)
    pricer = Pricer(fleet, SessionTable(0.2), round_steps=150.0)
    arrival, columns = pricer.arrival(asked, now_s), fleet.columns("m")
    assert columns is not None
    costs = pricer.costs(arrival, columns)
    for i in range(len(items)):
        terms = pricer.terms(arrival, i)
        assert costs.cost_s[i] == pytest.approx(terms.cost_s, rel=1e-9, abs=1e-9)
        assert costs.round_s[i] == pytest.approx(terms.round_s, rel=1e-9, abs=1e-9)
