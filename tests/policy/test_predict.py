"""Beliefs about latency: how a prompt splits, what an admission costs, and how rounds correct a wrong profile (SPEC §3.5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.instance import CallView, RoundSummary, SlotSummary
from talaria.policy.predict import Predictor, admission_s, split_prompt
from tests.policy.builders import TIMING, call

SLOT = SlotSummary(
    model="a",
    opened_s=0.0,
    closed_s=4.0,
    switch_s=0.0,
    switch_predicted_s=0.0,
    prefill_s=0.0,
    prefill_predicted_s=0.0,
    decode_s=0.0,
    decode_predicted_s=0.0,
    sp_admitted=0,
    parked=0,
    p_admitted=1,
    sp_batches=0,
    d_steps=0,
    sp_s=0.0,
    linger_s=0.0,
    parked_calls=(),
    oversize=0,
)


def summary(**slot: float) -> RoundSummary:
    return RoundSummary(0, 0.0, 4.0, 4.0, 0.0, (replace(SLOT, **slot),), 0.0, False, False)  # type: ignore[arg-type]


def test_device_host_recomputed_and_new_tokens_make_up_the_prompt() -> None:
    item = CallView(call(1, turn=1, prompt=1000, reusable=800), 0.0, device_tokens=300, host_tokens=200)
    assert split_prompt(item) == (300, 200, 300, 200)


def test_more_than_the_lines_own_prefix_can_be_cached() -> None:
    """Sessions share a system prompt: nothing is lost, and less is new."""
    item = CallView(call(1, prompt=1000, reusable=0), 0.0, device_tokens=600)
    assert split_prompt(item) == (600, 0, 0, 400)


@given(st.integers(1, 10**6), st.data())
def test_the_split_adds_up_for_any_cache(prompt: int, data: st.DataObject) -> None:
    reusable = data.draw(st.integers(0, prompt))
    device = data.draw(st.integers(0, prompt))
    on_host = data.draw(st.integers(0, prompt - device))
    split = split_prompt(CallView(call(1, turn=1, prompt=prompt, reusable=reusable), 0.0, device, on_host))
    assert sum(split) == prompt and min(split) >= 0


def test_an_admission_costs_restore_and_prefill_and_recomputation_of_what_is_lost() -> None:
    timing = replace(TIMING, recompute_base_s=1.0, recompute_s_per_token=1e-3)
    item = CallView(call(1, turn=1, prompt=1000, reusable=800), 0.0, device_tokens=300, host_tokens=200)
    assert admission_s(timing, item) == pytest.approx((0.01 + 200e-5) + (1.0 + 0.3) + 200e-4)


def test_a_belief_moves_towards_what_rounds_took() -> None:
    predictor = Predictor({"a": TIMING}, alpha=0.2)
    predictor.observe(summary(prefill_s=2.0, prefill_predicted_s=1.0, decode_s=0.5, decode_predicted_s=1.0))
    belief = predictor.timing("a")
    assert belief.prefill_s_per_token == pytest.approx(1.2 * TIMING.prefill_s_per_token)
    assert belief.decode_base_s == pytest.approx(0.9 * TIMING.decode_base_s)
    assert belief.d2d_switch_s == TIMING.d2d_switch_s, "no switch was seen"


@pytest.mark.parametrize("error", [0.7, 1.3])
def test_a_profile_wrong_by_thirty_percent_is_corrected_within_twenty_rounds(error: float) -> None:
    """Each round observes the truth against the belief of that moment."""
    predictor = Predictor({"a": TIMING.scaled(prefill=error, decode=error, switch=error)}, alpha=0.2)
    for _ in range(20):
        belief = predictor.timing("a")
        predictor.observe(
            summary(
                prefill_s=TIMING.prefill_s(5000, 0),
                prefill_predicted_s=belief.prefill_s(5000, 0),
                decode_s=TIMING.step_s(4, 9000),
                decode_predicted_s=belief.step_s(4, 9000),
                switch_s=TIMING.switch_s(0.5),
                switch_predicted_s=belief.switch_s(0.5),
            )
        )
    belief = predictor.timing("a")
    assert belief.prefill_s(5000, 0) == pytest.approx(TIMING.prefill_s(5000, 0), rel=0.01)
    assert belief.step_s(4, 9000) == pytest.approx(TIMING.step_s(4, 9000), rel=0.01)
    assert belief.switch_s(0.5) == pytest.approx(TIMING.switch_s(0.5), rel=0.01)


def test_one_odd_round_moves_a_belief_no_further_than_its_weight_allows() -> None:
    predictor = Predictor({"a": TIMING}, alpha=0.2)
    predictor.observe(summary(decode_s=1e6, decode_predicted_s=1.0))
    assert predictor.timing("a").decode_base_s == pytest.approx(TIMING.decode_base_s * (1 + 0.2 * 3))


def test_weight_zero_keeps_the_profile() -> None:
    predictor = Predictor({"a": TIMING}, alpha=0.0)
    predictor.observe(summary(decode_s=9.0, decode_predicted_s=1.0))
    assert predictor.timing("a") == TIMING


def test_a_round_corrects_only_the_models_that_it_served() -> None:
    predictor = Predictor({"a": TIMING, "b": TIMING}, alpha=0.5)
    predictor.observe(summary(decode_s=2.0, decode_predicted_s=1.0))
    assert predictor.timing("b") == TIMING != predictor.timing("a")
