"""A call in segments is the same call: real SGLang, flushed between segments as by a switch, against the same request unheld."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from talaria.gpu import config
from talaria.gpu.protocol import engine
from tests.gpu.conftest import CPU
from tests.gpu.holding import MODEL, Desk, HeldEngine, desk, new_call, running_engine
from tests.gpu.streams import essence

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "count", "ok"],
    "additionalProperties": False,
}
_FUNCTION: dict[str, Any] = {"name": "run", "description": "Runs a command."}
_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 10}, "timeout": {"type": "integer"}},
    "required": ["command", "timeout"],
}
_TOOL = {"type": "function", "function": {**_FUNCTION, "parameters": _PARAMETERS}}
_MESSAGES = [{"role": "user", "content": "fix the failing test"}]
_ANSWER_ONLY = {"chat_template_kwargs": {"enable_thinking": False}}
_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}}
_CHAT = {"messages": _MESSAGES, "max_tokens": 24}
_FORCED = {"messages": _MESSAGES, "max_tokens": 60, "tools": [_TOOL]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat: reasoning": ("/v1/chat/completions", _CHAT),
    "chat: answer": ("/v1/chat/completions", _CHAT | _ANSWER_ONLY),
    "chat: JSON schema": ("/v1/chat/completions", _CHAT | _ANSWER_ONLY | _JSON | {"max_tokens": 60}),
    "chat: tool of the client's choice": (
        "/v1/chat/completions",
        _FORCED | _ANSWER_ONLY | {"tool_choice": {"type": "function", "function": {"name": "run"}}},
    ),
    "chat: any tool": ("/v1/chat/completions", _FORCED | {"tool_choice": "required"}),
    "chat: penalties": (
        "/v1/chat/completions",
        _CHAT | {"max_tokens": 40, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    ),
    "chat: logprobs": ("/v1/chat/completions", _CHAT | {"max_tokens": 12, "logprobs": True, "top_logprobs": 3}),
    "chat: minimum": ("/v1/chat/completions", _CHAT | {"min_tokens": 20, "logit_bias": {"2": 60}}),
    "completion": ("/v1/completions", {"prompt": "read the file and fix", "max_tokens": 24}),
    "completion: echo, logprobs": ("/v1/completions", {"prompt": "read the file", "max_tokens": 9, "echo": True, "logprobs": 2}),
    "response": ("/v1/responses", {"input": "fix the failing test", "max_output_tokens": 24}),
    "response: tool": (
        "/v1/responses",
        {
            "input": "fix it",
            "max_output_tokens": 60,
            "tool_choice": "required",
            "tools": [{"type": "function", **_FUNCTION, "parameters": _PARAMETERS}],
        },
    ),
    "message": ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 24}),
    "message: tool": (
        "/v1/messages",
        {
            "messages": _MESSAGES,
            "max_tokens": 60,
            "tools": [{**_FUNCTION, "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "run"},
        },
    ),
}


def _body(path: str, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
    return {"model": MODEL, "temperature": 0, "stream": stream, **usage, **body}


async def _same(at: Desk, path: str, body: dict[str, Any], steps: tuple[int, ...]) -> list[engine.Ended]:
    """Runs the request unheld and in segments and compares; returns the ends of the segments."""
    await at.flush()
    status, whole = await at.post(path, body)
    assert status == 200, whole
    await at.flush()
    at.agent.steps, at.agent.between = steps, at.flush
    call = new_call()
    status, parts = await at.post(path, body, call)
    assert status == 200, parts
    await at.agent.last(call)
    (skeletons, pieces), (expected, whole_pieces) = essence(parts, body["stream"]), essence(whole, body["stream"])
    assert skeletons == expected
    assert _exact(pieces) == _exact(whole_pieces)
    assert _numbers(pieces) == pytest.approx(_numbers(whole_pieces), abs=1e-4)
    ends: list[engine.Ended] = at.agent.of(call, engine.Ended)
    return ends


def _exact(pieces: dict[str, Any]) -> Any:
    """All but the numbers of logprobs, which depend on how a batch is computed."""
    return json.loads(json.dumps(pieces), parse_float=lambda _: 0.0)


def _numbers(value: Any) -> list[float]:
    found: list[float] = []
    json.loads(json.dumps(value), parse_float=lambda text: found.append(float(text)))
    return [number for number in found if math.isfinite(number)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_an_answer_in_segments_reads_like_an_unsegmented_one(held_engine: HeldEngine, case: str, stream: bool) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            path, body = CASES[case]
            ends = await _same(at, path, _body(path, body, stream), (0, 2, 5))
            assert [end.reason for end in ends] == ["grant"] * (len(ends) - 1) + ["finished"]
            assert len(ends) >= 3

    asyncio.run(check())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_across_a_boundary_is_found_and_no_part_of_it_told(held_engine: HeldEngine, stream: bool) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            request = {"prompt": "read the file and fix", "max_tokens": 40}
            _, whole = await at.post("/v1/completions", _body("", request, False))
            text = json.loads(whole)["choices"][0]["text"]
            at_char = len(text) // 3
            stop = text[at_char : at_char + 9]
            for steps in (1, 2, 3):
                body = _body("/v1/completions", request | {"stop": [stop, "never"]}, stream)
                ends = await _same(at, "/v1/completions", body, (steps,))
                assert len(ends) >= 3 and ends[-1].output_tokens < 40

    asyncio.run(check())


@pytest.mark.parametrize("moment", [engine.Grant, engine.Progress], ids=["before they begin", "at every token"])
def test_an_answer_whose_segments_are_stopped_reads_like_an_unstopped_one(
    held_engine: HeldEngine, moment: type[engine.Grant | engine.Progress]
) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            at.agent.stop_at = moment
            reasons: list[str] = []
            for path, body in [*CASES.values(), *await _that_end_by_themselves(at)]:
                ends = await _same(at, path, _body(path, body, True), (10**6,))
                assert ends[-1].reason == "finished"
                reasons += [end.reason for end in ends[:-1]]
            assert set(reasons) == {"stopped"}
            assert len(reasons) > len(CASES) or moment is engine.Progress, "a fast engine may be done before it hears of a later one"

    asyncio.run(check())


async def _that_end_by_themselves(at: Desk) -> list[tuple[str, dict[str, Any]]]:
    """Requests that end with a stop string, or a stop token, which the stop of a segment may meet."""
    path, request = "/v1/completions", {"prompt": "read the file and fix", "max_tokens": 40}
    _, whole = await at.post(path, _body(path, request, False))
    text = json.loads(whole)["choices"][0]["text"]
    stops = [{"stop": [text[at_char : at_char + 9]]} for at_char in range(len(text) // 3, len(text) // 3 + 6)]
    _, whole = await at.post("/generate", {"text": request["prompt"], "sampling_params": {"temperature": 0, "max_new_tokens": 40}})
    return [(path, request | stop) for stop in [*stops, *({"stop_token_ids": [token]} for token in json.loads(whole)["output_ids"][4:9])]]


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_tokens_are_those_of_a_single_run_and_none_more_than_granted(held_engine: HeldEngine, steps: int) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            body = {"text": "the quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}}
            _, whole = await at.post("/generate", body)
            at.agent.steps, at.agent.between = (steps,), at.flush
            call = new_call()
            await at.post("/generate", body, call)
            await at.agent.last(call)
            assert at.agent.output(call) == json.loads(whole)["output_ids"]
            sizes = [len(end.tokens) // 4 for end in at.agent.of(call, engine.Ended)]
            assert sizes[0] == 1 + steps
            assert sizes[1:-1] == [steps] * (len(sizes) - 2)
            counted = [progress.output_tokens for progress in at.agent.of(call, engine.Progress)]
            assert counted == sorted(counted) and counted[0] >= 1 and counted[-1] == 30

    asyncio.run(check())


def test_a_stream_goes_on_after_its_engine_gave_its_memory_to_another(held_engine: HeldEngine) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            switches = 0

            async def switch() -> None:
                nonlocal switches
                assert await at.control("/pause_generation", {"mode": "in_place"}) == 200
                assert await at.control("/flush_cache") == 200
                assert await at.control("/release_memory_occupation", {}) == 200
                assert await at.control("/resume_memory_occupation", {}) == 200
                assert await at.control("/continue_generation", {}) == 200
                switches += 1

            path, body = "/v1/chat/completions", _body("/v1/chat/completions", CASES["chat: any tool"][1], True)
            _, whole = await at.post(path, body)
            await at.flush()
            at.agent.steps, at.agent.between = (10,), switch
            _, parts = await at.post(path, body, new_call())
            assert essence(parts, True)[1] == essence(whole, True)[1]
            assert switches >= 3

    asyncio.run(check())


@pytest.mark.full
def test_a_call_ends_where_the_engine_is_full_just_as_unheld(held_engine: HeldEngine) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            prompt = [5 + n % 300 for n in range(19_900)]
            body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}}
            _, whole = await at.post("/generate", body)
            expected = json.loads(whole)["output_ids"]
            for steps in (len(expected) - 1, len(expected) - 2):
                at.agent.steps, call = (steps,), new_call()
                await at.post("/generate", body, call)
                end = await at.agent.last(call)
                assert (end.reason, at.agent.output(call)) == ("finished", expected)
                assert (await at.agent.first(call, engine.Held)).max_tokens == len(expected) < 500

    asyncio.run(check())


def test_calls_that_run_side_by_side_in_segments_of_their_own_do_not_mix(held_engine: HeldEngine) -> None:
    async def check() -> None:
        async with desk(held_engine) as at:
            bodies = [_body("/v1/completions", {"prompt": f"report number {n}", "max_tokens": 20 + n}, True) for n in range(8)]
            alone = [essence((await at.post("/v1/completions", body))[1], True)[1] for body in bodies]
            at.agent.steps = (1, 4, 2)
            together = await asyncio.gather(*(at.post("/v1/completions", body, new_call()) for body in bodies))
            assert [essence(text, True)[1] for _, text in together] == alone

    asyncio.run(check())


_TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments, tp",
    [(("--disable-overlap-schedule",), 1), (("--incremental-streaming-output",), 1), (("--chunked-prefill-size", "16"), 1), ((), 2)],
    ids=["no overlap", "incremental output", "small chunks", "two ranks"],
)
def test_answers_in_segments_are_exact_on_engines_of_other_kinds_too(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, arguments: tuple[str, ...], tp: int
) -> None:
    settings = cpu_engine.model_copy(update={"environment": cpu_engine.environment | (_TWO_RANKS if tp > 1 else {})})

    async def check(held: HeldEngine) -> None:
        async with desk(held) as at:
            for path, body in CASES.values():
                for stream in (False, True):
                    assert len(await _same(at, path, _body(path, body, stream), (0, 2, 5))) >= 3
            at.agent.stop_at = engine.Progress
            for path, body in CASES.values():
                await _same(at, path, _body(path, body, True), (10**6,))

    with running_engine(settings, tiny_models / "qwen3", tmp_path, tp=tp, arguments=arguments) as held:
        asyncio.run(check(held))


@pytest.mark.full
def test_seeded_samples_are_the_same_in_segments(cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path) -> None:
    async def check(held: HeldEngine) -> None:
        async with desk(held) as at:
            for seed in (1, 2, 3):
                body = _body("", {"prompt": "read the file", "max_tokens": 30, "temperature": 1.0, "seed": seed}, True)
                assert len(await _same(at, "/v1/completions", body, (0, 2, 5))) >= 3

    with running_engine(cpu_engine, tiny_models / "llama", tmp_path, shims=str(CPU / "seeds")) as held:
        asyncio.run(check(held))
