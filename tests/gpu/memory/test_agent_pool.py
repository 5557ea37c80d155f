"""Two real models in turns over one host pool that is too small for them: sessions read on as if nothing had ever been switched."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.agent.main import Agent
from talaria.gpu.memory.store import HostStore
from talaria.gpu.protocol import agent as wire
from talaria.policy.knobs import Knobs, with_values
from talaria.policy.snapshot import Tier
from tests.gpu.agent_process import AgentProcess, own_agent
from tests.gpu.memory.pooled import ARGUMENTS, environment
from tests.gpu.test_agent_engines import CALLS, KNOBS, MODELS, SESSIONS, TIMEOUT_S, Answers, check_against_unsegmented, run_session

POOL_GIB = 0.04
"""About 160 pages of the tiny models on each rank, at one a slab; the sessions have more than 200."""
FAULTS = ("", "", "broken", "lag")


def cluster(cpu_engine: config.Engine, tiny_models: Path, fault: Path, tp: int) -> config.ClusterConfig:
    variables = environment(cpu_engine, fault, tp)
    models = {name: {"path": str(tiny_models / name), "kv_tokens": 20_000, "arguments": ARGUMENTS} for name in MODELS}
    document = {
        "schema": "talaria.cluster/1", "name": "pair", "models": models, "policy": {"knobs": KNOBS},
        "instances": [{"name": "g0", "models": list(MODELS), "tp": tp, "host_kv_gib": POOL_GIB * tp}],
        "engine": cpu_engine.model_copy(update={"environment": variables}).model_dump(mode="json"),
    }  # fmt: skip
    return config.check(document, "the test's cluster")


def store_of(agent: Agent) -> HostStore:
    assert agent.engines._memory is not None
    return agent.engines._memory.store


async def make_trouble(agent: Agent, fault: Path, stop: asyncio.Event) -> None:
    """Restores fail and ranks lag, by turns, and the books balance all the while."""
    draw = random.Random(3)
    while not stop.is_set():
        fault.write_text(draw.choice(FAULTS))
        await asyncio.wait([asyncio.create_task(stop.wait())], timeout=0.2)
        assert store_of(agent).audit() == []
    fault.write_text("")


async def converse(process: AgentProcess, agent: Agent, fault: Path, answers: Answers) -> None:
    stop = asyncio.Event()
    trouble = asyncio.create_task(make_trouble(agent, fault, stop))
    try:
        await asyncio.gather(*(run_session(process, number, answers) for number in range(SESSIONS)))
    finally:
        stop.set()
        await trouble


def host_lines(process: AgentProcess) -> int:
    """Lines whose prefix the last snapshot showed on the host, or continued there."""
    assert process.snapshot is not None
    return sum(line.tier is Tier.HOST for line in process.snapshot.lines.values())


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("tp", [1, 2])
def test_two_real_models_in_turns_keep_their_sessions_on_the_host(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, tp: int
) -> None:
    answers: Answers = {}
    fault = tmp_path / "fault"

    async def run() -> AgentProcess:
        async with own_agent(cluster(cpu_engine, tiny_models, fault, tp), "g0") as (process, agent):
            await process.until("the engines are up", lambda: process.snapshot is not None, TIMEOUT_S)
            assert process.snapshot is not None and process.snapshot.capabilities.hkvr
            await process.reset(with_values(Knobs(), KNOBS))
            async with asyncio.timeout(TIMEOUT_S):
                await converse(process, agent, fault, answers)
                check_books(process, agent)
                await return_by_turns(process, answers)
                await process.until("a snapshot with prefixes on the host", lambda: host_lines(process) > 0)
                agent.engines.forget_host_kv()
                await check_against_unsegmented(process, agent, answers)
                assert store_of(agent).audit() == []
            return process

    process = asyncio.run(run())
    assert len(process.ended) == len(answers) == SESSIONS * CALLS + 4
    assert len(process.of(wire.Switched)) >= 2


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("tp", "killed"), [(1, True), (2, True), (1, False)])
def test_sessions_outlive_an_engine_that_is_lost_in_the_middle_of_a_call_and_of_its_checkpoint(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, tp: int, killed: bool
) -> None:
    """It is killed, or its rank says what is no message, is heard no more, and is still there."""
    answers: Answers = {}
    fault = tmp_path / "fault"

    async def run() -> None:
        async with own_agent(cluster(cpu_engine, tiny_models, fault, tp), "g0") as (process, agent):
            await process.until("the engines are up", lambda: process.snapshot is not None, TIMEOUT_S)
            for number in (0, 1, 0, 1):
                turn = sum(session == number for session, _ in answers)
                await run_session(process, number, answers, range(turn, turn + 1))
            before = set(process.ended)
            long = asyncio.create_task(long_call(process, answers))
            await running(agent, "qwen3")
            pid = agent.engines.engines["qwen3"].pid
            assert pid is not None
            fault.write_text("stuck" if killed else "nonsense")
            if killed:
                await process.until("a checkpoint that is under way", lambda: any(store_of(agent)._open.values()))
                os.kill(pid, signal.SIGKILL)
            await process.until("the engine's end", lambda: agent.engines.engines["qwen3"].pid != pid)
            await process.until("nothing is kept for the dead", lambda: not store_of(agent).registry.held_bytes)
            assert store_of(agent).audit() == []
            fault.write_text("")
            await long
            await run_session(process, 1, answers, range(2, 3))
            survived, other = (process.ended[call] for call in sorted(process.ended.keys() - before))
            for call in (survived, other):
                assert call.outcome == "completed" and call.device_tokens == 0 and call.host_tokens > 0.5 * call.prompt_tokens
            agent.engines.forget_host_kv()
            await check_against_unsegmented(process, agent, answers)

    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await run()

    asyncio.run(bounded())


async def long_call(process: AgentProcess, answers: Answers) -> None:
    """The third turn of session 0, with many more tokens than one grant has."""
    asked, text = answers[0, 1]
    messages = [*asked["messages"], {"role": "assistant", "content": text}, {"role": "user", "content": "write the report"}]
    body = {"messages": messages, "max_tokens": 600, "temperature": 0.0, "ignore_eos": True}
    call, status, content = await process.call("qwen3", "session 0", body, turn=2, estimate=320)
    assert status == 200 and process.ended[call].outcome == "completed", content
    answers[0, 2] = ({"model": "qwen3", **body}, json.loads(content)["choices"][0]["message"]["content"])


async def running(agent: Agent, model: str) -> None:
    """A call of the model has had its first token."""
    instance = agent._instance
    assert instance is not None
    async with asyncio.timeout(TIMEOUT_S):
        while not any(run.model == model and run.view.generated_tokens for run in instance.runs.values()):
            await asyncio.sleep(0.002)


def check_books(process: AgentProcess, agent: Agent) -> None:
    for call in process.ended.values():
        assert call.outcome == "completed"
        new = call.prompt_tokens - call.device_tokens - call.host_tokens - call.recomputed_tokens
        assert new >= 0 and call.output_tokens == 24
    kv = agent.engines.host_kv()
    assert kv.evicted_pages > 0, "the pool was not too small"
    assert 0 < kv.used <= kv.capacity


async def return_by_turns(process: AgentProcess, answers: Answers) -> None:
    """One session of each model, so that every call needs a switch, and every second one comes back to a prefix of just now."""
    before = set(process.ended)
    for turn in (CALLS, CALLS + 1):
        for number in (0, 1):
            await run_session(process, number, answers, range(turn, turn + 1))
    returns = [process.ended[call] for call in sorted(process.ended.keys() - before)][2:]
    assert [call.device_tokens for call in returns] == [0, 0]
    assert all(call.host_tokens > 0.5 * call.prompt_tokens for call in returns), "returns found nothing on the host"
