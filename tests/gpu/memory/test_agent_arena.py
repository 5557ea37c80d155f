"""Two real models in one arena, under an agent that stages the next one: sessions read on, switches are told as they were, a dead engine
takes nothing with it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.agent.main import Agent
from talaria.gpu.agent.metrics import exposition
from talaria.gpu.protocol import agent as wire
from talaria.policy.knobs import Knobs, with_values
from tests.gpu.agent_process import AgentProcess, own_agent
from tests.gpu.memory.shared import LINKER, variables
from tests.gpu.memory.test_agent_pool import long_call, running
from tests.gpu.test_agent_engines import CALLS, KNOBS, MODELS, SESSIONS, TIMEOUT_S, Answers, check_against_unsegmented, run_session

ARENA = {"managed_gib": 0.04, "chunk_kib": 16, "check": True}


def cluster(cpu_engine: config.Engine, tiny_models: Path, fault: Path) -> config.ClusterConfig:
    fault.write_text("")
    settings = cpu_engine.model_copy(update={"environment": variables(cpu_engine, 1, fault)})
    models = {name: {"path": str(tiny_models / name), "kv_tokens": 20_000, "arguments": LINKER} for name in MODELS}
    document = {
        "schema": "talaria.cluster/1", "name": "pair", "models": models, "policy": {"knobs": KNOBS},
        "instances": [{"name": "g0", "models": list(MODELS), "max_running": 16, "host_kv_gib": 0.1, "arena": ARENA}],
        "engine": settings.model_dump(mode="json"),
    }  # fmt: skip
    return config.check(document, "the test's cluster")


def check_switches(process: AgentProcess, agent: Agent) -> None:
    """Every switch says what it moved, and monitoring adds it up."""
    assert agent.arenas is not None
    weights = {model: nbytes for (model, _), (_, nbytes) in agent.arenas.images.items()}
    switches = [switch for switch in process.of(wire.Switched) if switch.path != "open"]
    assert len(switches) >= 2
    for switch in switches:
        assert switch.d2d_bytes + switch.h2d_bytes == weights[switch.target]
        assert switch.coverage == switch.d2d_bytes / weights[switch.target] and 0.0 <= switch.dirty <= 1.0 - switch.coverage + 1e-9
        assert switch.path == ("d2d" if not switch.h2d_bytes else "partial" if switch.d2d_bytes else "h2d")
        assert all(phase_s > 0.0 for phase_s in switch.phases_s)
    shown = exposition(agent._instance, agent._telemetry).decode()
    for way in ("d2d", "h2d"):
        (line,) = [line for line in shown.splitlines() if line.startswith(f'talaria_agent_switch_bytes_total{{way="{way}"}}')]
        assert float(line.split()[-1]) == sum(getattr(switch, f"{way}_bytes") for switch in process.of(wire.Switched))


@pytest.mark.full
def test_two_real_models_in_turns_share_an_arena(cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path) -> None:
    answers: Answers = {}

    async def run() -> AgentProcess:
        async with own_agent(cluster(cpu_engine, tiny_models, tmp_path / "fault"), "g0") as (process, agent):
            await process.until("the engines are up", lambda: process.snapshot is not None, TIMEOUT_S)
            assert process.snapshot is not None and process.snapshot.capabilities.staging
            await process.reset(with_values(Knobs(), KNOBS))
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(run_session(process, number, answers) for number in range(SESSIONS)))
                check_switches(process, agent)
                agent.engines.forget_host_kv()
                await check_against_unsegmented(process, agent, answers)
            return process

    process = asyncio.run(run())
    assert len(process.ended) == SESSIONS * CALLS and {call.outcome for call in process.ended.values()} == {"completed"}


@pytest.mark.full
@pytest.mark.parametrize("killed", [True, False])
def test_an_engine_that_is_lost_while_it_stages_and_serves_is_opened_again(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, killed: bool
) -> None:
    """It is killed, or its arena's connection ends, and it is still there."""
    answers: Answers = {}

    async def run() -> None:
        async with own_agent(cluster(cpu_engine, tiny_models, tmp_path / "fault"), "g0") as (process, agent):
            await process.until("the engines are up", lambda: process.snapshot is not None, TIMEOUT_S)
            for number in (0, 1, 0, 1):
                turn = sum(session == number for session, _ in answers)
                await run_session(process, number, answers, range(turn, turn + 1))
            long = asyncio.create_task(long_call(process, answers))
            await running(agent, "qwen3")
            agent.engines.stage("llama", 1.0)
            pid = agent.engines.engines["qwen3"].pid
            assert pid is not None and agent.arenas is not None
            if killed:
                os.kill(pid, signal.SIGKILL)
            else:
                (rank,) = (rank for rank in agent.arenas.ranks if rank.model == "qwen3")
                rank.connection.close("the test wants it")
            await process.until("the engine's end", lambda: agent.engines.engines["qwen3"].pid != pid)
            await long
            await run_session(process, 1, answers, range(2, 3))
            assert {call.outcome for call in process.ended.values()} == {"completed"}
            agent.engines.forget_host_kv()
            await check_against_unsegmented(process, agent, answers)
            assert agent.arenas.owners() == ["llama"]

    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await run()

    asyncio.run(bounded())
