"""The latency shape that follows from a profile, and the published values that the paper profiles must give back."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.timing import Timing
from talaria.profiles import load, names

ALL = [(name, model) for name in names() for model in load(name).models]
tokens = st.integers(1, 200_000)


@pytest.mark.parametrize(("name", "model"), ALL)
def test_no_time_is_negative_and_every_kind_of_work_takes_some(name: str, model: str) -> None:
    timing = load(name).timing(model)
    assert all(getattr(timing, field.name) >= 0 for field in fields(Timing))
    assert min(timing.prefill_s(1, 0), timing.step_s(1, 1), timing.restore_s(1), timing.swap_s_per_token, timing.d2d_switch_s) > 0


@pytest.mark.parametrize(("name", "model"), ALL)
def test_staged_is_faster_than_host_and_host_is_faster_than_open(name: str, model: str) -> None:
    timing = load(name).timing(model)
    assert timing.d2d_switch_s < timing.switch_s(0.5) < timing.h2d_switch_s < timing.open_s


@given(st.sampled_from(ALL), tokens, tokens, st.integers(0, 100_000))
def test_more_tokens_never_take_less_time(which: tuple[str, str], few: int, more: int, cached: int) -> None:
    timing = load(which[0]).timing(which[1])
    low, high = sorted((few, more))
    assert timing.prefill_s(low, cached) <= timing.prefill_s(high, cached)
    assert timing.prefill_s(low, cached) <= timing.prefill_s(low, cached + 1)
    assert timing.restore_s(low) <= timing.restore_s(high)


@given(st.sampled_from(ALL), st.integers(1, 256), st.integers(1, 256), tokens)
def test_a_larger_batch_or_context_never_decodes_faster(which: tuple[str, str], few: int, more: int, context: int) -> None:
    timing = load(which[0]).timing(which[1])
    low, high = sorted((few, more))
    assert timing.step_s(low, context) <= timing.step_s(high, context) <= timing.step_s(high, context + 1)


def test_a_switch_is_its_fixed_phases_and_its_bytes_over_the_bandwidth() -> None:
    profile = load("paper-tp8")
    hardware, weights = profile.hardware, profile.models["Qwen3-235B"].weight_bytes
    timing = profile.timing("Qwen3-235B")
    staged_s, unstaged_s = 0.0219 + 0.0045 + 0.0005 + 0.0083 + 0.0002, 0.0219 + 0.0005 + 0.0003 + 0.0083 + 0.0002
    assert timing.d2d_switch_s == pytest.approx(staged_s + weights / hardware.d2d_bytes_per_s)
    assert timing.h2d_switch_s == pytest.approx(unstaged_s + weights / hardware.h2d_bytes_per_s)


def test_fully_staged_switches_of_the_replay_take_about_the_published_time() -> None:
    """106 ms at p50; it is the smallest model that is mostly staged whole."""
    profile = load("paper-tp8")
    assert min(profile.timing(model).d2d_switch_s for model in profile.models) == pytest.approx(0.106, rel=0.15)


def test_recompute_has_the_published_slope_and_a_smaller_base() -> None:
    """4.3 s at 25K tokens and 10.9 s at 100K are medians of TTFT, in which waiting may be included."""
    timing = load("paper-tp8").timing("Qwen3-235B")
    short_s, long_s = (timing.prefill_s(0, 0, lost_tokens=tokens) for tokens in (25_000, 100_000))
    assert long_s - short_s == pytest.approx(10.9 - 4.3)
    assert 4.3 - 2.1 <= short_s <= 4.3 and 10.9 - 2.1 <= long_s <= 10.9


@pytest.mark.parametrize("name", [name for name in names() if not name.startswith("paper-")])
def test_the_published_recompute_curve_stays_out_of_fitted_profiles(name: str) -> None:
    profile = load(name)
    assert all(profile.timing(model).recompute_s_per_token == 0 for model in profile.models)


def test_recurrent_state_is_restored_whole_and_reused_by_checkpoints() -> None:
    profile = load("paper-tp8")
    hybrid, dense = profile.timing("Qwen3.5-122B-A10B"), profile.timing("Qwen3-235B")
    state_s = profile.models["Qwen3.5-122B-A10B"].state_bytes / profile.hardware.restore_bytes_per_s
    assert hybrid.restore_base_s == pytest.approx(dense.restore_base_s + state_s)
    assert (dense.page_tokens, hybrid.page_tokens) == (64, 1024)


def test_use_beyond_the_fitted_points_is_said_and_use_within_is_not() -> None:
    profile = load("b200")
    assert profile.beyond_evidence("Qwen3-32B", prompt_tokens=100_000, batch=32) == ()
    said = profile.beyond_evidence("Qwen3-32B", prompt_tokens=200_000, batch=64)
    assert [phrase.split(" to ")[0] for phrase in said] == ["Qwen3-32B prefill", "Qwen3-32B decode", "Qwen3-32B decode"]
    assert any("batch 64" in phrase and "32" in phrase for phrase in said)
    assert load("paper-tp8").beyond_evidence("Qwen3-235B", prompt_tokens=120_000, batch=1)
