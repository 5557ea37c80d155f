"""Synthesised prompts share with each other exactly what the trace says, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from talaria.gpu.run.prompts import PromptBook, SessionText
from talaria.workload.open import open_workload
from talaria.workload.session import Session, TraceCall

VOCABULARY = {"big": range(100, 400), "small": range(10, 60)}


def book(seed: int = 0, block_tokens: int = 0, block_scope: str = "session") -> PromptBook:
    return PromptBook(seed, {model: list(ids) for model, ids in VOCABULARY.items()}, block_tokens, block_scope)


def common(a: np.ndarray, b: np.ndarray) -> int:
    shortest = min(len(a), len(b))
    different = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(different[0]) if len(different) else shortest


def call(model: str = "big", turn: int = 0, prompt: int = 300, output: int = 20, **fields: object) -> TraceCall:
    return TraceCall("main", model, turn, prompt, output, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_of_a_drawn_workload_has_its_length_and_continues_what_was_said(seed: int) -> None:
    workload = open_workload({"preset": "quickstart", "models": ["big", "small"], "sessions": 6, "depth_cap": 12}, seed)
    prompts = book(seed)
    for session in workload.sessions():
        text = SessionText()
        for index, each in enumerate(session.calls):
            ids = prompts.prompt(session, index, text)
            assert len(ids) == each.prompt_tokens and set(ids.tolist()) <= {*VOCABULARY[each.model], 7}
            if each.reuse_of is not None:
                said = np.concatenate([text.prompts[each.reuse_of], text.responses[each.reuse_of]])
                assert common(ids, said) >= each.reuse_tokens
            text.responses[index] = np.full(each.output_tokens, 7, np.uint32)  # what the engine really said


def test_a_continuation_shares_no_more_than_the_trace_says() -> None:
    session = Session("s", (call(), call(turn=1, prompt=500, reuse_of=0, reuse_tokens=100)))
    text, prompts = SessionText(), book()
    first = prompts.prompt(session, 0, text)
    assert common(first, prompts.prompt(session, 1, text)) < 110


def test_sessions_have_their_shared_tokens_in_common_and_no_more() -> None:
    sessions = [Session(name, (call(),), shared_tokens=shared) for name, shared in (("a", 128), ("b", 200), ("c", 0))]
    prompts = book()
    a, b, c = (prompts.prompt(session, 0, SessionText()) for session in sessions)
    assert 128 <= common(a, b) < 140 and common(a, c) < 12


def test_equal_blocks_are_equal_content_in_their_scope() -> None:
    sessions = [Session(name, (call(blocks=(11, 12, tail)),)) for name, tail in (("a", 13), ("b", 14))]

    def shared(scope: str) -> int:
        prompts = book(block_tokens=64, block_scope=scope)
        return common(*(prompts.prompt(session, 0, SessionText()) for session in sessions))

    assert 128 <= shared("global") < 140 and shared("session") < 12


def test_a_prompt_of_another_model_continues_nothing() -> None:
    session = Session("s", (call(), call(model="small", prompt=400, reuse_of=0, reuse_tokens=300)))
    text, prompts = SessionText(), book()
    prompts.prompt(session, 0, text)
    assert set(prompts.prompt(session, 1, text).tolist()) <= set(VOCABULARY["small"])


def test_the_same_seed_draws_the_same_prompts_and_another_seed_others() -> None:
    session = Session("s", (call(),), shared_tokens=50)
    one, again, other = (book(seed).prompt(session, 0, SessionText()) for seed in (1, 1, 2))
    assert (one == again).all() and common(one, other) < 12
