"""The instance agent over real SGLang engines: two tiny models in turns on one cold instance, against the same engines unsegmented."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from talaria.gpu import config
from talaria.gpu.agent.main import Agent
from talaria.gpu.protocol import agent as wire
from talaria.policy.codec import CODEC
from talaria.policy.instance import Admit, Resume
from talaria.policy.knobs import Knobs, with_values
from talaria.report.declog import DecisionLog
from talaria.report.replay import replay
from tests.gpu.agent_process import CHAT, AgentProcess, own_agent

MODELS = ("qwen3", "llama")
SESSIONS, CALLS = 8, 5
TIMEOUT_S = 600.0
PAUSES = (2, 4)
"""Turns before which a session waits for one more switch away from its model: so many there are on any machine."""
KNOBS: dict[str, object] = {"t_ttft": 100.0, "t_tpot": 10.0, "gamma": 0.9, "linger": 30.0}
"""At most nine protected steps a slot: calls of 24 tokens need several grants. Slots end when nothing is expected, not by their time: no
machine is too slow for a return within."""
Answers = dict[tuple[int, int], tuple[dict[str, Any], str]]
"""By session and turn: what was asked, and the answer's text."""


def cluster(cpu_engine: config.Engine, tiny_models: Path) -> config.ClusterConfig:
    models = {name: {"path": str(tiny_models / name), "kv_tokens": 20_000} for name in MODELS}
    document = {
        "schema": "talaria.cluster/1", "name": "pair", "models": models, "instances": [{"name": "g0", "models": list(MODELS)}],
        "engine": cpu_engine.model_dump(mode="json"), "policy": {"knobs": KNOBS},
    }  # fmt: skip
    return config.check(document, "the test's cluster")


async def run_session(agent: AgentProcess, number: int, answers: Answers, turns: range = range(CALLS)) -> None:
    """Calls one after the other, each continuing the one before; no return is expected in a pause and at the end."""
    model, session = MODELS[number % 2], f"session {number}"
    task = f"task {number}: fix the failing test"
    messages = [{"role": "system", "content": "You are a careful agent. " * 12}, {"role": "user", "content": task}]
    for turn in range(turns.stop):
        if turn > 0:
            text = answers[number, turn - 1][1]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"step {turn - 1}: run it again and report"}]
        if turn < turns.start:
            continue
        if turn > turns.start and turn in PAUSES:
            await agent.end_lease(model, session)
            await switched(agent, model, 1 + PAUSES.index(turn))
        body = {"messages": list(messages), "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        call, status, content = await agent.call(model, session, body, turn=turn, estimate=200 + 60 * turn)
        assert status == 200 and agent.ended[call].outcome == "completed", content
        text = json.loads(content)["choices"][0]["message"]["content"]
        answers[number, turn] = ({"model": model, **body}, text)
        await asyncio.sleep(0.02 * number)
    await agent.end_lease(model, session)


async def switched(agent: AgentProcess, model: str, times: int) -> None:
    """The instance has been switched away from the model so often."""

    def happened() -> bool:
        return sum(switch.source == model for switch in agent.of(wire.Switched)) >= times

    await agent.until(f"{times} switches away from {model}", happened, TIMEOUT_S)


async def unsegmented(agent: Agent, model: str, body: dict[str, Any]) -> str:
    """The same request at the engine itself, past the plugin, on an empty cache."""
    async with aiohttp.ClientSession() as http, http.post(agent.engines.url(model) + CHAT, json=body) as answer:
        return str((await answer.json())["choices"][0]["message"]["content"])


def test_two_real_models_in_turns_answer_as_if_each_were_alone(cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path) -> None:
    answers: Answers = {}

    async def run() -> AgentProcess:
        async with own_agent(cluster(cpu_engine, tiny_models), "g0") as (process, agent):
            await process.until("the engines are up", lambda: process.snapshot is not None, TIMEOUT_S)
            await process.reset(with_values(Knobs(), KNOBS))
            process.tau_s = 30.0
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(run_session(process, number, answers) for number in range(SESSIONS)))
                await check_against_unsegmented(process, agent, answers)
            return process

    process = asyncio.run(run())
    ended = list(process.ended.values())
    assert len(ended) == SESSIONS * CALLS
    for call in ended:
        new = call.prompt_tokens - call.device_tokens - call.host_tokens - call.recomputed_tokens
        assert new >= 0 and call.output_tokens == 24 and call.prompt_tokens > 100
    decisions = [CODEC.decode(json.loads(message.line)["commands"]) for message in process.of(wire.Decision)]
    commands = [command for step in decisions for command in step]
    assert any(isinstance(command, Resume) for command in commands), "no call needed a second grant"
    assert any(isinstance(command, Admit) and command.phase == "SP" for command in commands), "SP admitted nothing"
    in_slot = [call for call in ended if call.by_sp]
    assert in_slot and all(call.device_tokens > 0.5 * (call.prompt_tokens - 60) for call in in_slot), "returns missed the prefix cache"
    assert len(process.of(wire.Switched)) >= 2 * len(PAUSES)
    replayed(process, tmp_path / "decisions.jsonl")


async def check_against_unsegmented(process: AgentProcess, agent: Agent, answers: Answers) -> None:
    """Each model is made active in turn, emptied, and asked everything again, in stock generations."""
    before = len(process.ended)
    for model in MODELS:
        if agent.engines.residency(model).value != "active":
            (source,) = [name for name in MODELS if name != model]
            await agent.engines.switch(source, model)
        await agent.engines.flush(model)
        for body, text in answers.values():
            if body["model"] == model:
                assert await unsegmented(agent, model, body) == text
    assert len(process.ended) == before


def replayed(process: AgentProcess, path: Path) -> None:
    """The agent's decisions, fed through a fresh policy, come out the same."""
    with DecisionLog(path) as log:
        knobs = with_values(Knobs(), KNOBS)
        log.header(
            scenario="pair", config="agent", seed=0, router="full", router_arguments={"instances": {}, "knobs": knobs},
            slots_arguments={"g0": {"knobs": knobs}},
        )  # fmt: skip
        for message in process.of(wire.Decision):
            log.line(message.line.decode())
    found = replay(path)
    assert found.decisions > SESSIONS * CALLS and found.count == 0, found.first
