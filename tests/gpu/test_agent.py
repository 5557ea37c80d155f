"""The instance agent as a process over stub engines, with the gateway's part played by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from talaria.gpu.protocol import agent as wire
from talaria.policy.snapshot import Residency
from tests.gpu.agent_process import AgentProcess, agent_process
from tests.gpu.cluster import stub_document

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
