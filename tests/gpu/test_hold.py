"""What happens to calls that an engine's plugin holds: refusals, clients and agents that go away, calls that are dropped."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from talaria.gpu import compat, config, plugin
from talaria.gpu.protocol import engine
from tests.gpu.holding import MODEL, PATIENCE_S, Desk, HeldEngine, desk, new_call
from tests.gpu.streams import events

_MESSAGES = [{"role": "user", "content": "run the tests"}]
_LONG = 4000
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": _LONG},
    "/v1/completions": {"prompt": "run the tests", "max_tokens": _LONG},
    "/v1/responses": {"input": "run the tests", "max_output_tokens": _LONG},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": _LONG},
}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each = pytest.mark.parametrize("path", BODIES)


def _body(path: str, stream: bool) -> dict[str, Any]:
    never_ends = {"logit_bias": {"2": -100}} if "completions" in path else {}
    return {"model": MODEL, "temperature": 0, "stream": stream, **never_ends, **BODIES[path]}


def _error(text: str, stream: bool) -> tuple[str, Any]:
    """Message and code or type of the error in an answer, in whichever of the endpoints' formats."""
    found = [event for event in (events(text) if stream else [json.loads(text)]) if "error" in json.dumps(event)]
    assert found, text
    error = found[-1].get("response", found[-1])
    error = error.get("error", error)
    return error["message"], error.get("code", error.get("type"))


def at_desk(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """``test`` as pytest knows tests; its first parameter is a desk of the engine, not the engine."""

    @functools.wraps(test)
    def run(held_engine: HeldEngine, **parameters: Any) -> None:
        async def check() -> None:
            async with desk(held_engine) as at:
                await test(at, **parameters)

        asyncio.run(check())

    fixture = inspect.Parameter("held_engine", inspect.Parameter.KEYWORD_ONLY)
    _, *others = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature([*others, fixture])  # type: ignore[attr-defined]
    return run


async def _idle(at: Desk) -> None:
    """The engine works on nothing any more."""
    async with asyncio.timeout(PATIENCE_S):
        await at.flush()


@at_desk
async def test_the_greeting_tells_the_engines_limits_and_the_server_shows_the_protocol(at: Desk) -> None:
    async with at.http.get("/server_info", headers=at.held.admin) as response:
        info = await response.json()
    hello = at.agent.hello
    assert hello is not None
    assert (hello.abi, hello.model, hello.page_tokens, hello.kv_tokens) == (engine.ABI, MODEL, 16, 20_000)
    assert (hello.max_running, hello.context_tokens) == (16, 32768)
    assert [state["talaria_abi"] for state in info["internal_states"]] == [engine.ABI]


@each
@both
@at_desk
async def test_a_request_without_the_header_is_not_held(at: Desk, path: str, stream: bool) -> None:
    at.agent.granting = False
    short = {"max_output_tokens" if "responses" in path else "max_tokens": 3}
    status, text = await at.post(path, _body(path, stream) | short)
    assert status == 200, text


@pytest.mark.parametrize(
    "path, change, told",
    [
        ("/v1/chat/completions", {"n": 2}, "n = 1"),
        ("/v1/completions", {"prompt": ["one", "two"]}, "batches"),
        ("/v1/completions", {"prompt": "word " * 30_000, "max_tokens": 5}, "longer than"),
        ("/v1/completions", {"prompt": [5] * 21_000, "max_tokens": 5}, "KV cache"),
        ("/v1/completions", {"prompt": []}, "empty"),
        ("/v1/completions", {"prompt": [5, -1], "max_tokens": 5}, "token ids"),
        ("/v1/completions", {"prompt": [5, 10**7], "max_tokens": 5}, "token ids"),
        ("/v1/completions", {"temperature": -1}, "temperature"),
        ("/v1/completions", {"min_tokens": 9, "max_tokens": 3}, "min_new_tokens"),
        ("/v1/chat/completions", {"messages": []}, "essages"),
        ("/v1/responses", {"background": True, "store": True}, "background"),
    ],
)
@both
@at_desk
async def test_what_cannot_be_held_is_a_400_and_never_reaches_the_agent(
    at: Desk, path: str, change: dict[str, Any], told: str, stream: bool
) -> None:
    call = new_call()
    status, text = await at.post(path, _body(path, stream) | change, call)
    assert (status, told in text) == (400, True), text
    assert not at.agent.of(call, engine.Held)


@at_desk
async def test_tokens_of_a_message_are_counted_as_held(at: Desk) -> None:
    call = new_call()
    _, text = await at.post("/v1/messages/count_tokens", {"model": MODEL, "messages": _MESSAGES})
    await at.post("/v1/messages", _body("/v1/messages", True) | {"max_tokens": 2}, call)
    assert json.loads(text)["input_tokens"] == len((await at.agent.first(call, engine.Held)).prompt) // 4


@at_desk
async def test_a_header_that_is_no_call_id_is_refused(at: Desk) -> None:
    status, text = await at.post("/v1/completions", _body("/v1/completions", False), "talaria-1")
    assert status == 400 and engine.CALL_HEADER in text


@each
@both
@at_desk
async def test_a_call_dropped_while_held_is_an_error_of_the_endpoint(at: Desk, path: str, stream: bool) -> None:
    at.agent.granting = False
    call = new_call()
    answer = asyncio.create_task(at.post(path, _body(path, stream), call))
    await at.agent.first(call, engine.Held)
    at.agent.send(engine.Drop(call, 429, "too much to do"))
    status, text = await answer
    in_stream = stream and path in ("/v1/messages", "/v1/responses")
    assert status == (200 if in_stream else 429)
    assert "too much to do" in _error(text, in_stream)[0]
    end = await at.agent.last(call)
    assert (end.reason, end.output_tokens) == ("failed", 0)


@each
@both
@at_desk
async def test_a_call_dropped_while_it_runs_is_an_error_and_leaves_the_engine_idle(at: Desk, path: str, stream: bool) -> None:
    call = new_call()
    answer = asyncio.create_task(at.post(path, _body(path, stream), call))
    await at.agent.until(lambda: len(at.agent.of(call, engine.Progress)) > 5)
    at.agent.send(engine.Drop(call, 429, "over the deadline"))
    status, text = await answer
    assert status == (200 if stream else 429), text
    assert "over the deadline" in _error(text, stream)[0]
    assert (await at.agent.last(call)).reason == "failed"
    await _idle(at)


@each
@both
@at_desk
async def test_a_client_that_leaves_a_held_call_ends_it(at: Desk, path: str, stream: bool) -> None:
    at.agent.granting = False
    call = new_call()
    answer = asyncio.create_task(at.post(path, _body(path, stream), call))
    await at.agent.first(call, engine.Held)
    answer.cancel()
    assert (await at.agent.last(call)).reason == "aborted"


@each
@both
@at_desk
async def test_a_client_that_leaves_a_running_call_ends_it_and_frees_the_engine(at: Desk, path: str, stream: bool) -> None:
    call = new_call()
    answer = asyncio.create_task(at.post(path, _body(path, stream), call))
    await at.agent.until(lambda: len(at.agent.of(call, engine.Progress)) > 5)
    answer.cancel()
    end = await at.agent.last(call)
    assert end.reason == "aborted" and 5 < end.output_tokens < _LONG
    await _idle(at)


@at_desk
async def test_ending_one_call_leaves_others_with_similar_ids_alone(at: Desk) -> None:
    path = "/v1/completions"
    calls = [engine.call_id(number) for number in (0xABC1, 0xABC10, 0xABC11, 0xABC100)]
    tokens = [_LONG, 150, 150, 150]  # the one that is to be ended runs on
    bodies = [_body(path, True) | {"max_tokens": most} for most in tokens]
    answers = [asyncio.create_task(at.post(path, body, call)) for body, call in zip(bodies, calls, strict=True)]
    for call in calls:
        await at.agent.first(call, engine.Progress)
    at.agent.send(engine.Drop(calls[0], 503, "gone"))
    ends = [await at.agent.last(call) for call in calls]
    assert [end.reason for end in ends] == ["failed", "finished", "finished", "finished"]
    assert [end.output_tokens for end in ends[1:]] == [150] * 3
    await asyncio.gather(*answers)


@at_desk
async def test_a_paused_engine_holds_calls_and_runs_them_once_it_continues(at: Desk) -> None:
    path, call = "/v1/chat/completions", new_call()
    assert await at.control("/pause_generation", {"mode": "in_place"}) == 200
    try:
        answer = asyncio.create_task(at.post(path, _body(path, True) | {"max_tokens": 4}, call))
        await at.agent.first(call, engine.Held)
    finally:
        assert await at.control("/continue_generation", {}) == 200
    assert (await answer)[0] == 200
    assert (await at.agent.last(call)).reason == "finished"


@at_desk
async def test_a_paused_engine_costs_little_cpu(at: Desk) -> None:
    assert await at.control("/pause_generation", {"mode": "in_place"}) == 200
    try:
        start_s = at.held.cpu_s()
        await asyncio.sleep(2.0)
        assert at.held.cpu_s() - start_s < 1.0
    finally:
        assert await at.control("/continue_generation", {}) == 200


@both
@at_desk
async def test_a_dropped_call_is_answered_while_its_engine_stands_still(at: Desk, stream: bool) -> None:
    path, call = "/v1/chat/completions", new_call()
    answer = asyncio.create_task(at.post(path, _body(path, stream), call))
    await at.agent.first(call, engine.Progress)
    assert await at.control("/pause_generation", {"mode": "in_place"}) == 200
    try:
        at.agent.send(engine.Drop(call, 503, "the engine hangs"))
        assert "the engine hangs" in (await answer)[1]
    finally:
        assert await at.control("/continue_generation", {}) == 200
    await _idle(at)


@at_desk
async def test_losing_the_agent_ends_its_calls_and_the_engine_comes_back_to_the_next(at: Desk) -> None:
    path = "/v1/chat/completions"
    at.agent.granting = False
    held, running = new_call(), new_call()
    answers = [asyncio.create_task(at.post(path, _body(path, False), call)) for call in (held, running)]
    for call in (held, running):
        await at.agent.first(call, engine.Held)
    at.agent.send(engine.Grant(running, 100_000))
    await at.agent.first(running, engine.Progress)
    await at.agent.cut()
    assert [status for status, _ in await asyncio.gather(*answers)] == [503, 503]
    await at.agent.until(lambda: at.agent.hello)
    at.agent.granting = True
    status, _ = await at.post(path, _body(path, False) | {"max_tokens": 3}, new_call())
    assert status == 200
    await _idle(at)


@at_desk
async def test_an_engine_without_an_agent_refuses_calls_at_once(at: Desk) -> None:
    at.held.socket.unlink()
    await at.agent.cut()
    for stream in (False, True):
        status, text = await at.post("/v1/chat/completions", _body("/v1/chat/completions", stream), new_call())
        assert status == 503 and "agent" in text


@at_desk
async def test_what_is_no_message_closes_the_connection_and_hurts_nobody(at: Desk) -> None:
    for junk in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1"):
        connections = at.agent.hellos
        at.agent.write(junk)
        await at.agent.until(lambda known=connections: at.agent.hellos > known)
    at.agent.send(engine.Grant(engine.call_id(2**63), 5))
    at.agent.send(engine.Drop(engine.call_id(2**63), 500, "unknown"))
    status, _ = await at.post("/v1/completions", _body("/v1/completions", False) | {"max_tokens": 3}, new_call())
    assert status == 200


def test_a_server_that_no_agent_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine.SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr(compat, "install", lambda hooks: pytest.fail("hooks were installed"))
    plugin.load()


def test_whatever_goes_wrong_in_the_plugin_keeps_the_server_from_starting_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(hooks: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setenv(engine.SOCKET_VARIABLE, "agent.sock")
    monkeypatch.setattr(compat, "install", install)
    with pytest.raises(SystemExit, match=r"^talaria: .*unforeseen"):
        plugin.load()


def test_a_different_sglang_keeps_the_server_from_starting_with_one_line(cpu_engine: config.Engine, tmp_path: Path) -> None:
    program = (
        "from talaria.gpu import seams\n"
        "seams.CALLED = {'json.dumps': ('obj', 'unlikely'), 'json.nothing': ()}\n"
        "seams.HELD = {'json.JSONDecoder': ('decode', 'missing')}\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('started')\n"
    )
    environment = {**os.environ, **cpu_engine.environment, engine.SOCKET_VARIABLE: str(tmp_path / "agent.sock")}
    assert cpu_engine.python is not None
    done = subprocess.run([cpu_engine.python, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "started" not in done.stdout
    line = done.stderr.strip().splitlines()[-1]
    assert all(part in line for part in ("talaria: SGLang", "json.dumps takes", "no json.nothing", "json.JSONDecoder has no missing"))
