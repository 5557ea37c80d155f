"""On real engines: a prefix comes back from the host after a switch, token for token, on every rank."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from talaria.gpu import config
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol import memory as protocol
from tests.gpu.holding import HeldEngine, running_engine

LINKERS = Path(__file__).resolve().parents[1] / "cpu" / "linkers"
PAGE_TOKENS = 16
SLAB_BYTES = 4096
"""A page of the tiny models takes several, and the last one is not full."""
POOL_BYTES = 64 * 2**20
PATIENCE_S = 240.0


def arguments(linker: str) -> tuple[str, ...]:
    chosen = {"linker": linker, "linker_module_path": "talaria_linkers"}
    return (
        "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic",
        "--unified-cache-external-linker-config", json.dumps(chosen),
    )  # fmt: skip


class Client:
    """One engine, and the conversations with it."""

    def __init__(self, engine: HeldEngine, http: aiohttp.ClientSession) -> None:
        self._engine, self._http = engine, http

    async def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}
        async with self._http.post("/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            said: dict[str, Any] = await answer.json()
            return said

    async def control(self, path: str, body: dict[str, Any]) -> None:
        async with self._http.post(path, json=body, headers=self._engine.admin) as answer:
            assert answer.status == 200, (path, await answer.text())

    async def switch_away_and_back(self) -> None:
        tags = {"tags": ["weights", "kv_cache", "cuda_graph"]}
        await self.control("/pause_generation", {"mode": "in_place"})
        await self.control("/flush_cache", {})
        await self.control("/release_memory_occupation", tags)
        await self.control("/resume_memory_occupation", tags)
        await self.control("/continue_generation", {})


@asynccontextmanager
async def served(settings: config.Engine, model: Path, directory: Path, linker: str, tp: int) -> AsyncIterator[tuple[Client, MemoryServer]]:
    """An engine with a pool. It is started and stopped in a thread: the pool's server needs the event loop."""
    server = MemoryServer(POOL_BYTES, tp, SLAB_BYTES)
    path = directory / "memory.sock"
    await server.start(path)
    environment = {**settings.environment, protocol.SOCKET_VARIABLE: str(path)}
    if tp > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
    engine = running_engine(
        replace_environment(settings, environment), model, directory, tp=tp, arguments=arguments(linker), shims=str(LINKERS)
    )
    held = await asyncio.to_thread(engine.__enter__)
    try:
        async with aiohttp.ClientSession(held.url, timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
            yield Client(held, http), server
    finally:
        await asyncio.to_thread(engine.__exit__, None, None, None)
        await server.stop()


def replace_environment(settings: config.Engine, environment: dict[str, str]) -> config.Engine:
    return settings.model_copy(update={"environment": environment})


async def conversation(client: Client, server: MemoryServer, *, turns: int, switching: bool) -> tuple[list[list[int]], int]:
    """Outputs of three growing conversations, turn by turn, and the tokens that came from the host."""
    draw = random.Random(5)
    sessions = [[draw.randrange(4, 420) for _ in range(40 + 30 * number)] for number in range(3)]
    outputs, restored = [], 0
    for _ in range(turns):
        for tokens in sessions:
            known = len(tokens)
            said = await client.generate(tokens, 12)
            details = said["meta_info"].get("cached_tokens_details") or {}
            restored += details.get("host", 0)
            outputs.append(said["output_ids"])
            tokens += said["output_ids"] + [draw.randrange(4, 420) for _ in range(7)]
            assert known
            assert server.store.audit() == []
        if switching:
            await client.switch_away_and_back()
            assert server.store.audit() == []
            assert not server.store.registry.held_bytes
    return outputs, restored


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_sessions_resume_with_the_tokens_of_an_engine_that_never_switched(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, tp: int
) -> None:
    async def main() -> None:
        async with served(cpu_engine, tiny_models / "qwen3", tmp_path, "PoisonedLinker", tp) as (client, server):
            calm, none = await conversation(client, server, turns=3, switching=False)
            await client.switch_away_and_back()
            assert none == 0
            switched, restored = await conversation(client, server, turns=3, switching=True)
            assert switched == calm
            assert restored > 0
            print("restored", restored, server.store.used_bytes)

    asyncio.run(main())
