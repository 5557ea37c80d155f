"""Generated workloads follow the laws of SPEC §7, lazily, the same in every process."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.workload import generate
from talaria.workload.generate import preset
from talaria.workload.recipes import PRESETS, resolve
from talaria.workload.session import Session
from talaria.workload.stats import regime
from talaria.workload.streams import stream
from tests.conftest import REPOSITORY

# SPEC §7 gives means over 100 seeds. The spread between seeds was measured once over 300 seeds; a mean over 20 seeds
# then differs from one over 100 by a standard error of spread·sqrt(1/20 + 1/100). Four of those, and the last digit.
SEEDS = range(20)
REGIME = {
    ("depth", "p50"): (11.0, 0.68, 0.5),
    ("depth", "p95"): (48.7, 4.4, 0.05),
    ("depth", "max"): (161.0, 28.6, 0.5),
    ("prompt_tokens", "p50"): (24_900.0, 1000.0, 50.0),
    ("prompt_tokens", "p95"): (104_800.0, 7000.0, 50.0),
    ("gap_s", "p50"): (0.390, 0.0044, 0.0005),
    ("gap_s", "p95"): (1.314, 0.033, 0.0005),
    ("gaps_from_10_s", ""): (0.022, 0.0018, 0.0005),
    ("reusing_over_half", ""): (0.968, 0.0024, 0.0005),
}


@pytest.fixture(scope="module")
def corpora() -> list[dict]:
    return [regime(preset("corpus", seed)) for seed in SEEDS]


@pytest.mark.parametrize(("quantity", "figure"), REGIME)
def test_the_corpus_has_the_published_regime(corpora: list[dict], quantity: str, figure: str) -> None:
    expected, spread, digit = REGIME[quantity, figure]
    found = statistics.fmean(corpus[quantity][figure] if figure else corpus[quantity] for corpus in corpora)
    assert abs(found - expected) <= 4 * spread * math.sqrt(1 / len(SEEDS) + 1 / 100) + digit


def by_model(sessions: list[Session]) -> dict[str, list[Session]]:
    grouped: dict[str, list[Session]] = {}
    for session in sessions:
        grouped.setdefault(session.calls[0].model, []).append(session)
    return grouped


@pytest.mark.parametrize("name", ["replay960", "replay960_swe"])
@pytest.mark.parametrize("seed", [0, 1, 188])
def test_a_replay_is_ten_issues_on_three_models_with_320_calls_each(name: str, seed: int) -> None:
    grouped = by_model(list(preset(name, seed).sessions()))
    assert sorted(grouped) == ["GLM5-nvfp4", "Qwen3-235B", "Qwen3.5-122B-A10B"]
    for sessions in grouped.values():
        assert len(sessions) == 10
        assert sum(len(session.calls) for session in sessions) == 320


def test_a_cap_of_ten_seconds_touches_about_twenty_gaps_of_a_replay() -> None:
    capped = [sum(call.gap_s >= 10.0 for s in preset("replay960", seed).sessions() for call in s.calls) for seed in range(25)]
    # Binomial: 930 continuations, 2.15 % long; standard error of a mean over 25 draws.
    expected, error = 930 * 0.0215, math.sqrt(930 * 0.0215 * 0.9785 / 25)
    assert abs(statistics.fmean(capped) - expected) < 4 * error


def test_the_swe_replay_never_breaks_its_prefixes() -> None:
    for session in preset("replay960_swe", 7).sessions():
        assert session.calls[0].prompt_tokens > session.shared_tokens == 14_500
        for before, call in pairwise(session.calls):
            assert call.reuse_tokens == before.prompt_tokens + before.output_tokens


@pytest.mark.parametrize(("name", "sessions", "depth"), [("placement", 30, 4), ("tau_sweep", 24, 5)])
def test_the_small_testbed_presets_have_sessions_of_equal_depth_on_three_models(name: str, sessions: int, depth: int) -> None:
    grouped = by_model(list(preset(name, 3).sessions()))
    assert [len(group) for group in grouped.values()] == [sessions // 3] * 3
    assert {len(session.calls) for group in grouped.values() for session in group} == {depth}


def test_the_gaps_of_the_tau_sweep_have_a_median_of_5_6_seconds() -> None:
    logs = [math.log(c.gap_s) for seed in range(20) for s in preset("tau_sweep", seed).sessions() for c in s.calls[1:]]
    # The median of n lognormal gaps has a standard error of 1.2533·σ/sqrt(n) in logs.
    assert abs(statistics.median(logs) - math.log(5.6)) < 4 * 1.2533 * 2.2 / math.sqrt(len(logs))


def test_a_plain_continuation_appends_to_the_previous_prompt_and_response_and_reuses_both() -> None:
    for session in preset("corpus", 0, sessions=40, break_probability=0.0, context_limit_tokens=9_000_000).sessions():
        for before, call in pairwise(session.calls):
            whole = before.prompt_tokens + before.output_tokens
            assert call.reuse_tokens == whole
            assert 5 <= call.prompt_tokens - whole <= 25_000


def test_a_rewrite_keeps_the_length_but_only_the_shared_tokens() -> None:
    unbounded = {"sessions": 40, "context_limit_tokens": 9_000_000}
    plain = preset("corpus", 0, break_probability=0.0, **unbounded)
    rewritten = preset("corpus", 0, break_probability=1.0, rewrite_share=1.0, **unbounded)
    for one, other in zip(plain.sessions(), rewritten.sessions(), strict=True):
        assert [call.prompt_tokens for call in other.calls] == [call.prompt_tokens for call in one.calls]
        assert {call.reuse_tokens for call in other.calls[1:]} <= {11_500}


def test_a_compaction_shrinks_the_prompt_to_the_shared_tokens_and_a_summary() -> None:
    compacted = preset("corpus", 0, break_probability=1.0, rewrite_share=0.0)
    calls = [call for session in compacted.sessions() for call in session.calls[1:]]
    assert {call.reuse_tokens for call in calls} == {11_500}
    summaries = [math.log(call.prompt_tokens - 11_500) for call in calls]
    assert abs(statistics.fmean(summaries) - math.log(6000)) < 4 * 0.5 / math.sqrt(len(calls))
    assert abs(statistics.stdev(summaries) - 0.5) < 4 * 0.5 / math.sqrt(2 * len(calls))


def test_the_breaks_are_as_frequent_and_of_the_kinds_that_the_recipe_says() -> None:
    plain = rewrites = compactions = 0
    for seed in range(4):
        for session in preset("corpus", seed).sessions():
            for before, call in pairwise(session.calls):
                whole = before.prompt_tokens + before.output_tokens
                if call.reuse_tokens == whole:
                    plain += 1
                elif call.prompt_tokens > whole:
                    rewrites += 1
                elif whole <= 135_000:  # beyond, it may have been forced
                    compactions += 1
    broken = rewrites + compactions
    # A compaction can also come out longer than a short prompt, hence the wider bound on the kinds.
    assert abs(broken / (plain + broken) - 0.0519) < 4 * math.sqrt(0.0519 * 0.9481 / (plain + broken)) + 0.001
    assert abs(rewrites / broken - 0.74) < 0.08


def test_a_prompt_that_would_pass_the_context_limit_is_compacted() -> None:
    workload = preset("corpus", 0, break_probability=0.0, append_session_sigma=2.0)
    forced = 0
    for session in workload.sessions():
        for before, call in pairwise(session.calls):
            assert call.prompt_tokens <= 160_000
            if call.reuse_tokens != before.prompt_tokens + before.output_tokens:
                assert call.reuse_tokens == 11_500
                assert before.prompt_tokens + before.output_tokens + 25_000 > 160_000
                forced += 1
    assert forced > 10


@given(name=st.sampled_from(sorted(PRESETS)), seed=st.integers(0, 2**63))
def test_every_drawn_call_is_one_that_a_trace_may_hold(name: str, seed: int) -> None:
    for session in islice(preset(name, seed).sessions(), 3):
        for index, call in enumerate(session.calls):
            assert call.turn == index
            assert call.prompt_tokens >= 1
            assert 1 <= call.output_tokens <= 8192
            assert call.gap_s == round(call.gap_s, 3) >= 0.0
            assert call.waits_for == ((index - 1,) if index else ())
            assert call.reuse_of == (index - 1 if index else None)
            if index:
                before = session.calls[index - 1]
                assert 0 < call.reuse_tokens <= min(call.prompt_tokens, before.prompt_tokens + before.output_tokens)


DIGEST = """
import hashlib, sys
from talaria.workload.generate import preset
print(hashlib.sha256(repr(list(preset(sys.argv[1], int(sys.argv[2])).sessions())).encode()).hexdigest())
"""


def digest_elsewhere(name: str, seed: int, hash_seed: str) -> str:
    """The digest of a workload that another process draws."""
    command = [sys.executable, "-c", DIGEST, name, str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def test_a_seed_gives_the_same_bytes_in_any_process() -> None:
    here = hashlib.sha256(repr(list(preset("replay960", 5).sessions())).encode()).hexdigest()
    assert here == digest_elsewhere("replay960", 5, "1") == digest_elsewhere("replay960", 5, "2")


def test_another_seed_gives_other_sessions() -> None:
    assert list(preset("quickstart", 0).sessions()) != list(preset("quickstart", 1).sessions())


def test_a_session_does_not_depend_on_those_that_follow_it() -> None:
    few, many = preset("mixed", 4, sessions=5), preset("mixed", 4, sessions=500)
    assert list(few.sessions()) == list(islice(many.sessions(), 5))


def test_overriding_one_law_leaves_the_draws_of_the_others() -> None:
    base, slow = preset("replay960", 2), preset("replay960", 2, gap_median_s=5.0, gap_sigma=1.0)
    for one, other in zip(base.sessions(), slow.sessions(), strict=True):
        assert [(call.prompt_tokens, call.output_tokens) for call in one.calls] == [
            (call.prompt_tokens, call.output_tokens) for call in other.calls
        ]


def test_sessions_are_drawn_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = generate._draw_calls
    monkeypatch.setattr(generate, "_draw_calls", lambda *args: drawn.append(1) or draw(*args))
    supply = preset("mixed", 0, sessions=6000).sessions()
    next(supply)
    next(supply)
    assert len(drawn) == 2


def test_models_come_in_order_of_falling_number_of_calls() -> None:
    workload = preset("mixed", 0)
    counted = regime(workload)["models"]
    assert list(counted) == list(workload.models())
    assert len(counted) == 5


def test_model_shares_make_some_models_popular() -> None:
    workload = preset("mixed", 0, models=("big", "small"), model_shares=(3, 1), sessions=2000)
    popular = sum(session.calls[0].model == "big" for session in workload.sessions())
    assert abs(popular / 2000 - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 2000)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40), st.integers(0, 500))
def test_rescaled_depths_add_up_exactly_in_proportion_with_at_least_one_call_each(weights: list[float], spare: int) -> None:
    total = len(weights) + spare
    parts = generate._apportion(np.array(weights), total)
    exact = np.array(weights) * total / sum(weights)
    assert parts.sum() == total
    assert parts.min() >= 1
    if exact.min() >= 1.0:
        assert np.abs(parts - exact).max() < 1.0 + 1e-9


def test_streams_of_different_names_or_seeds_are_unrelated() -> None:
    draws = [stream(seed, name).random(4000) for seed, name in [(0, "a"), (0, "b"), (1, "a")]]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        # The correlation of independent samples has a standard error of 1/sqrt(n).
        assert abs(np.corrcoef(draws[one], draws[other])[0, 1]) < 4 / math.sqrt(4000)
    assert (stream(0, "a").random(4000) == draws[0]).all()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"session": 3}, "unknown setting 'session'"),
        ({"sessions": 0}, "sessions = 0; allowed: greater than or equal to 1"),
        ({"gap_median_s": float("nan")}, "gap_median_s = nan"),
        ({"gap_sigma": "wide"}, "gap_sigma = 'wide'"),
        ({"break_probability": 1.5}, "break_probability = 1.5; allowed: less than or equal to 1"),
        ({"models": []}, "models = []"),
        ({"models": ["a", "a"]}, "allowed: each model once"),
        ({"model_shares": [1, 2]}, "allowed: one per model (3)"),
        ({"calls_per_model": 9}, "at least one call per session"),
        ({"sessions": 31}, "a whole number of sessions per model"),
        ({"append_floor_tokens": 30_000}, "allowed: at most append_cap_tokens (25000)"),
        ({"shared_tokens": 160_000}, "allowed: less than context_limit_tokens (160000)"),
    ],
)
def test_a_bad_override_is_refused_by_name(overrides: dict, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        preset("replay960", 0, **overrides)
    assert complaint in str(error.value)
    assert "replay960" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'replay960'"):
        preset("reply960", 0)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_keeps_its_own_bounds(name: str) -> None:
    assert resolve(name, {}) == PRESETS[name]


def kolmogorov_smirnov(one: list[float], other: list[float]) -> tuple[float, float]:
    """The distance of two samples' distributions, and the distance that chance exceeds once in a thousand."""
    values = np.sort(np.concatenate([one, other]))
    distance = np.abs(
        np.searchsorted(np.sort(one), values, "right") / len(one) - np.searchsorted(np.sort(other), values, "right") / len(other)
    ).max()
    return float(distance), 1.95 * math.sqrt((len(one) + len(other)) / (len(one) * len(other)))


@pytest.mark.parametrize(
    ("file", "name"), [("corpus_seed30070", "corpus"), ("replay960_seed188", "replay960"), ("replay960_swe_seed47", "replay960_swe")]
)
def test_ready_made_draws_of_the_recipe_have_the_same_distributions(shared: Path, file: str, name: str) -> None:
    with gzip.open(shared / "traces" / "generated" / f"talaria_like_{file}.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    calls = [call for seed in range(5) for session in preset(name, seed).sessions() for call in session.calls]
    for theirs, ours in [
        ([row["gap"] for row in rows if row["k"]], [call.gap_s for call in calls if call.turn]),
        ([row["out"] for row in rows], [call.output_tokens for call in calls]),
        ([row["prompt"] for row in rows if not row["k"]], [call.prompt_tokens for call in calls if not call.turn]),
    ]:
        distance, bound = kolmogorov_smirnov(theirs, ours)
        assert distance < bound
