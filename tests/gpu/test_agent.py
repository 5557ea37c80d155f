"""The instance agent as a process over stub engines, with the gateway's part played by the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from talaria.gpu.protocol import agent as wire
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import Residency, Tier
from tests.gpu.agent_process import CHAT, AgentProcess, agent_process
from tests.gpu.cluster import stub_document

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
Scene = Callable[[AgentProcess], Awaitable[None]]


def play(directory: Path, scene: Scene, **parts: Any) -> None:
    """Run ``scene`` with a greeted agent of one cold instance with models m0 (active) and m1."""

    async def run() -> None:
        async with agent_process(stub_document(directory, **parts), "g0") as agent:
            await agent.until("the first snapshot", lambda: agent.snapshot is not None)
            await scene(agent)

    asyncio.run(run())


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]


def check_books(ended: wire.CallEnded) -> None:
    new = ended.prompt_tokens - ended.device_tokens - ended.host_tokens - ended.recomputed_tokens
    assert new >= 0 and min(ended.device_tokens, ended.host_tokens, ended.recomputed_tokens) >= 0


def test_a_call_gets_its_answer_and_its_books_are_exact(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        number, status, body = await agent.call("m0", "s", {"messages": messages("hello there"), "max_tokens": 7})
        answer, ended = json.loads(body), agent.ended[number]
        assert status == 200 and answer["usage"]["completion_tokens"] == 7
        assert (ended.outcome, ended.prompt_tokens, ended.output_tokens) == ("completed", answer["usage"]["prompt_tokens"], 7)
        assert 0.0 < ended.admitted_s <= ended.first_token_s <= ended.ended_s
        check_books(ended)

    play(tmp_path, scene)


def test_models_take_turns_and_a_switched_out_model_serves_again(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        for turn in range(2):
            for model in ("m0", "m1"):
                number, status, _ = await agent.call(model, f"{model} {turn}", {"messages": messages("hi"), "max_tokens": 3})
                assert (status, agent.ended[number].outcome) == (200, "completed")
        switches = agent.of(wire.Switched)
        assert [switch.target for switch in switches] == ["m1", "m0", "m1"] and all(switch.path == "h2d" for switch in switches)

    play(tmp_path, scene)


def test_the_first_snapshot_follows_the_greeting_and_shows_the_engines(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        assert [type(message) for message in agent.heard[:2]] == [wire.AgentHello, wire.Snapshot]
        assert agent.snapshot is not None and agent.snapshot.seen_seq == 0
        assert {name: model.residency for name, model in agent.snapshot.models.items()} == {"m0": Residency.ACTIVE, "m1": Residency.PARKED}
        assert (await agent.get("/health"))["status"] == "ok" and "talaria_agent_healthy 1.0" in await agent.get("/metrics")

    play(tmp_path, scene)


def test_a_stream_over_many_grants_and_switches_is_one_stream(tmp_path: Path) -> None:
    """Two models with long answers take turns; every stream has all its tokens, once."""

    async def scene(agent: AgentProcess) -> None:
        body = {"messages": messages("hi"), "max_tokens": 120, "ignore_eos": True, **STREAM}
        calls = [agent.call(f"m{number % 2}", f"s{number}", body) for number in range(6)]
        for number, status, content in await asyncio.gather(*calls):
            assert status == 200 and content.endswith(b"data: [DONE]\n\n")
            assert agent.ended[number].output_tokens == 120 == usage(content)["completion_tokens"]
            check_books(agent.ended[number])
        assert len(agent.of(wire.Switched)) >= 3

    few_steps_a_slot = {"t_ttft": 1.0, "t_tpot": 0.5, "linger": 0.0}
    play(tmp_path, scene, policy={"knobs": few_steps_a_slot})


def usage(stream: bytes) -> dict[str, int]:
    """Of the last chunk that has one."""
    chunks = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))


def test_a_return_hits_the_prefix_cache_and_is_admitted_by_sp(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        def on_device(number: int) -> bool:
            line = agent.snapshot.lines.get(agent.keys[number]) if agent.snapshot else None
            return line is not None and line.tier is Tier.DEVICE

        agent.tau_s = 30.0  # so long the slot stays open
        long = asyncio.create_task(agent.call("m0", "other", {"messages": messages("x"), "max_tokens": 400, "ignore_eos": True}))
        text = "word " * 400
        first, _, _ = await agent.call("m0", "s", {"messages": messages(text), "max_tokens": 3})
        await agent.until("its prefix is known to be there", lambda: on_device(first))
        number, _, _ = await agent.call("m0", "s", {"messages": messages(text, "answer", "more"), "max_tokens": 3}, turn=1)
        ended = agent.ended[number]
        assert ended.by_sp and ended.device_tokens > 0.5 * ended.prompt_tokens
        check_books(ended)
        await long

    play(tmp_path, scene, step_s=0.01, policy={"knobs": {"t_ttft": 100.0, "linger": 30.0}})


def test_snapshots_show_lines_and_count_submissions_in_order(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        number, _, _ = await agent.call("m0", "s", {"messages": messages("word " * 300), "max_tokens": 3})
        await agent.call("m0", "t", {"messages": messages("word"), "max_tokens": 3})
        agent.submission("m0", "lost", 0)  # never sent
        await agent.call("m0", "u", {"messages": messages("word"), "max_tokens": 3})
        await agent.until("a heartbeat's snapshot", lambda: agent.snapshot is not None and agent.snapshot.seen_seq == 2)
        await agent.say(wire.Void(3))
        await agent.call("m0", "v", {"messages": messages("word"), "max_tokens": 3})
        await agent.until("the gap is void", lambda: agent.snapshot is not None and agent.snapshot.seen_seq == 5)
        assert agent.snapshot is not None
        line = agent.snapshot.lines[agent.keys[number]]
        assert line.tier is Tier.DEVICE and 0 < line.tokens <= agent.ended[number].prompt_tokens + 3

    play(tmp_path, scene)


def test_what_the_engine_refuses_reaches_the_client_as_the_engine_says_it(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        number, status, content = await agent.call("m0", "s", {"messages": messages("hi"), "max_tokens": 0})
        assert (status, agent.ended[number].outcome) == (400, "failed") and b"max_tokens" in content
        number, status, content = await agent.call("m0", "s", {"messages": messages("x " * 300_000), "max_tokens": 5})
        assert (status, agent.ended[number].outcome) == (400, "failed") and b"longer" in content
        await agent.call("m0", "s", {"messages": messages("hi"), "max_tokens": 2})

    play(tmp_path, scene)


def test_a_client_that_goes_away_frees_its_place_in_any_state(tmp_path: Path) -> None:
    """Waiting for its model, waiting beside a batch, and in the middle of its stream."""

    async def scene(agent: AgentProcess) -> None:
        running, first = agent.submission("m0", "running", 0)
        waiting, second = agent.submission("m1", "waiting", 0)
        body = {"messages": messages("hi"), "max_tokens": 100_000, "ignore_eos": True, **STREAM}
        async with agent.post(CHAT, {"model": "m0", **body}, first) as stream:
            await stream.content.readany()
            queued = asyncio.ensure_future(agent.call_with(second, "m1", body))
            await agent.until("both are seen", lambda: agent.snapshot is not None and agent.snapshot.seen_seq == 2)
            queued.cancel()
            await agent.until("the waiting call has ended", lambda: waiting in agent.ended)
        await agent.until("the running call has ended", lambda: running in agent.ended)
        assert {agent.ended[call].outcome for call in (running, waiting)} == {"failed"}
        assert 0 < agent.ended[running].output_tokens < 100_000
        await agent.call("m1", "next", {"messages": messages("hi"), "max_tokens": 3})

    play(tmp_path, scene, policy={"knobs": {"t_ttft": 30.0}})


def test_a_deadline_ends_a_call_with_an_error_whether_it_runs_or_waits(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        body = {"messages": messages("hi"), "max_tokens": 100_000, "ignore_eos": True}
        soon = wire.now_s() + 0.5
        both = [agent.call(model, model, body, deadline_s=soon) for model in ("m0", "m1")]
        for number, status, content in await asyncio.gather(*both):
            assert (status, agent.ended[number].outcome) == (504, "failed") and b"deadline" in content
        await agent.call("m0", "next", {"messages": messages("hi"), "max_tokens": 3})

    play(tmp_path, scene, policy={"knobs": {"t_ttft": 30.0}})


def test_a_model_that_cannot_start_is_refused_and_the_other_serves(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        await agent.call("m1", "s", {"messages": messages("hi"), "max_tokens": 3})
        number, status, content = await agent.call("m0", "s", {"messages": messages("hi"), "max_tokens": 3})
        assert (status, agent.ended[number].outcome) == (502, "failed") and b"m0" in content
        await agent.call("m1", "s", {"messages": messages("hi"), "max_tokens": 3})

    document = stub_document(tmp_path)
    document["models"]["m0"]["path"] = str(tmp_path / "nowhere")
    play(tmp_path, scene, models=document["models"])


def test_a_dead_engine_is_replaced_and_calls_that_sent_nothing_are_served(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        quiet = asyncio.create_task(agent.call("m0", "quiet", {"messages": messages("hi"), "max_tokens": 200, "ignore_eos": True}))
        number, headers = agent.submission("m0", "loud", 0)
        body = {"messages": messages("hi"), "max_tokens": 5000, "ignore_eos": True, **STREAM}
        async with agent.post(CHAT, {"model": "m0", **body}, headers) as stream:
            await stream.content.readany()
            os.kill(agent.engine_pid("m0"), signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                while await stream.content.readany():
                    pass
        served, status, _ = await quiet
        assert (status, agent.ended[served].outcome, agent.ended[served].output_tokens) == (200, "completed", 200)
        await agent.until("the loud call's books", lambda: number in agent.ended)
        assert agent.ended[number].outcome == "failed"

    play(tmp_path, scene)


def test_a_dead_parked_engine_costs_only_itself(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        running = asyncio.create_task(agent.call("m0", "s", {"messages": messages("hi"), "max_tokens": 300, "ignore_eos": True}))
        await agent.until("the call runs", lambda: agent.snapshot is not None)
        os.kill(agent.engine_pid("m1"), signal.SIGKILL)
        other = asyncio.create_task(agent.call("m1", "t", {"messages": messages("hi"), "max_tokens": 3}))
        for number, status, _ in (await running, await other):
            assert (status, agent.ended[number].outcome) == (200, "completed")
        assert [switch.path for switch in agent.of(wire.Switched)] == ["open"]

    play(tmp_path, scene)


def test_a_hung_engine_is_killed_and_its_calls_are_served_by_the_next(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        pid = agent.engine_pid("m0")
        await agent.fault("m0", "hang")
        number, status, _ = await agent.call("m0", "s", {"messages": messages("hi"), "max_tokens": 300, "ignore_eos": True})
        assert (status, agent.ended[number].outcome) == (200, "completed") and agent.engine_pid("m0") != pid

    play(tmp_path, scene, engine={"hang_s": 3.0})


def test_a_reset_begins_anew_and_records_from_the_first_step(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        await agent.call("m1", "before", {"messages": messages("word " * 100), "max_tokens": 3})
        await agent.reset(Knobs())
        await agent.until("its snapshot", lambda: agent.snapshot is not None and agent.snapshot.seen_seq == 0 and not agent.snapshot.lines)
        assert agent.snapshot is not None and agent.snapshot.models["m0"].residency is Residency.ACTIVE
        number, _, _ = await agent.call("m1", "after", {"messages": messages("word " * 100), "max_tokens": 3})
        assert agent.ended[number].device_tokens == 0
        events = [next(iter(json.loads(message.line)["event"])) for message in agent.of(wire.Decision)]
        assert events[:2] == ["Arrived", "SwitchDone"]

    play(tmp_path, scene)


def test_a_model_is_closed_when_its_calls_have_ended_and_opened_again(tmp_path: Path) -> None:
    """The active one, then a parked one: their engines' processes end, and start again without a call that asks for them."""

    async def scene(agent: AgentProcess) -> None:
        def shows(model: str, residency: Residency) -> bool:
            return agent.snapshot is not None and agent.snapshot.healthy and agent.snapshot.models[model].residency is residency

        call = asyncio.create_task(agent.call("m0", "a", {"messages": messages("hi"), "max_tokens": 40}))
        pid = agent.engine_pid("m0")
        await agent.say(wire.Close("m0"))
        number, status, _ = await call
        assert (status, agent.ended[number].outcome) == (200, "completed"), "calls that are there are served"
        await agent.until("it is closed", lambda: shows("m0", Residency.ABSENT))
        assert not Path(f"/proc/{pid}").exists()
        assert (await agent.call("m1", "b", {"messages": messages("hi"), "max_tokens": 3}))[1] == 200
        await agent.say(wire.Open("m0"))
        await agent.until("it is open", lambda: shows("m0", Residency.ACTIVE))
        assert agent.engine_pid("m0") != pid
        pid = agent.engine_pid("m1")
        await agent.say(wire.Close("m1"))
        await agent.until("the other is closed", lambda: shows("m1", Residency.ABSENT))
        await agent.until("its process has ended", lambda: not Path(f"/proc/{pid}").exists())
        assert (await agent.call("m0", "c", {"messages": messages("hi"), "max_tokens": 3}))[1] == 200
        await agent.say(wire.Open("m1"))
        await agent.until("it is open", lambda: shows("m1", Residency.ACTIVE))
        assert (await agent.call("m0", "c", {"messages": messages("hi"), "max_tokens": 3}))[1] == 200

    play(tmp_path, scene)


def test_a_hot_instance_whose_model_is_closed_rests_until_it_is_opened(tmp_path: Path) -> None:
    """Its scheduler would bring the model back at once; closed, it is unhealthy and idle, and a new gateway finds it open."""

    async def scene(agent: AgentProcess) -> None:
        def stands(residency: Residency, *, healthy: bool) -> bool:
            snapshot = agent.snapshot
            return snapshot is not None and snapshot.healthy is healthy and snapshot.models["m0"].residency is residency

        await agent.say(wire.Close("m0"))
        await agent.until("it is closed", lambda: stands(Residency.ABSENT, healthy=False))
        await agent.say(wire.Open("m0"))
        await agent.until("it is open", lambda: stands(Residency.ACTIVE, healthy=True))
        await agent.say(wire.Close("m0"))
        await agent.until("it is closed again", lambda: stands(Residency.ABSENT, healthy=False))
        await agent.disconnect()
        await agent.connect("its successor")
        await agent.until("it is open again", lambda: stands(Residency.ACTIVE, healthy=True))
        assert (await agent.call("m0", "c", {"messages": messages("hi"), "max_tokens": 3}))[1] == 200

    play(tmp_path, scene, instances=[{"name": "g0", "pool": "hot", "models": ["m0"]}])


def test_leases_outlive_a_gateway_and_its_successor_numbers_anew(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        agent.tau_s = 60.0
        number, _, _ = await agent.call("m0", "s", {"messages": messages("hi"), "max_tokens": 3})
        await agent.disconnect()
        agent.heard.clear()
        await agent.connect("its successor")
        await agent.until("the greeting", lambda: len(agent.heard) >= 2)
        hello = agent.of(wire.AgentHello)[0]
        assert [tuple(key) for key, _, _ in hello.leases] == [tuple(agent.keys[number])]
        assert agent.snapshot is not None and agent.snapshot.seen_seq == 0

    play(tmp_path, scene)


def test_only_the_key_opens_the_agent(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        async with aiohttp.ClientSession() as stranger:
            for path in (CHAT, wire.LINK_PATH, "/metrics"):
                async with stranger.request("POST" if path == CHAT else "GET", agent.url + path) as answer:
                    assert answer.status == 401

    play(tmp_path, scene)


def test_counting_tokens_needs_no_slot(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        async with agent.post("/v1/messages/count_tokens", {"model": "m1", "messages": messages("hi there")}, {}) as answer:
            assert answer.status == 200 and (await answer.json())["input_tokens"] > 0

    play(tmp_path, scene)


def test_a_hot_instance_admits_at_once_never_switches_and_comes_back_after_a_death(tmp_path: Path) -> None:
    async def scene(agent: AgentProcess) -> None:
        body = {"messages": messages("hi"), "max_tokens": 50, "ignore_eos": True}
        calls = [agent.call("m0", f"s{number}", body) for number in range(8)]
        for number, status, _ in await asyncio.gather(*calls):
            assert (status, agent.ended[number].outcome, agent.ended[number].output_tokens) == (200, "completed", 50)
        assert agent.of(wire.Switched) == [] and all(not agent.ended[number].by_sp for number in agent.ended)
        os.kill(agent.engine_pid("m0"), signal.SIGKILL)
        number, status, _ = await agent.call("m0", "after", body)
        assert (status, agent.ended[number].outcome) == (200, "completed")
        assert [switch.path for switch in agent.of(wire.Switched)] == ["open"]

    play(tmp_path, scene, instances=({"name": "g0", "pool": "hot", "models": ["m0"]},))
