"""For tests of the host pool: a real engine that keeps its KV in one, is poisoned at every flush, and fails on demand."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from talaria.gpu import config
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol import memory as protocol
from tests.gpu.holding import HeldEngine, running_engine

LINKERS = Path(__file__).resolve().parents[1] / "cpu" / "linkers"
SLAB_BYTES = 4096
"""A page of the tiny models takes several."""
POOL_BYTES = 64 * 2**20
PATIENCE_S = 240.0
FIRST_PROMPTS = (40, 70, 100)
"""Tokens of each session's first prompt."""
TAGS = {"tags": ["weights", "kv_cache", "cuda_graph"]}
ARGUMENTS = (
    "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic",
    "--unified-cache-external-linker-config", json.dumps({"linker": "PoisonedLinker", "linker_module_path": "talaria_linkers"}),
)  # fmt: skip


def environment(settings: config.Engine, fault: Path, tp: int = 1) -> dict[str, str]:
    """Of an engine with the tests' linker, which reads ``fault``."""
    fault.write_text("")
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(tp))} if tp > 1 else {}
    paths = f"{settings.environment['PYTHONPATH']}:{LINKERS}"
    return {**settings.environment, **bound, "PYTHONPATH": paths, "TALARIA_TEST_FAULT": str(fault)}


class Pooled:
    """One engine over its pool."""

    def __init__(self, engine: HeldEngine, server: MemoryServer, http: aiohttp.ClientSession, fault: Path) -> None:
        self.engine, self.server, self.fault = engine, server, fault
        self._http = http

    @property
    def family(self) -> str:
        """Of its KV, as its ranks said."""
        ((family, _),) = self.server.store._families.values()
        return family

    async def generate(self, tokens: list[int], count: int) -> tuple[int, dict[str, Any]]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}
        async with self._http.post("/generate", json=body) as answer:
            return answer.status, await answer.json()

    async def control(self, path: str, body: dict[str, Any]) -> None:
        async with self._http.post(path, json=body, headers=self.engine.admin) as answer:
            assert answer.status == 200, (path, await answer.text())

    async def switch_away_and_back(self) -> None:
        await self.control("/pause_generation", {"mode": "in_place"})
        await self.control("/flush_cache", {})
        await self.control("/release_memory_occupation", TAGS)  # its barrier waits for the flush of every rank
        assert self.server.store.audit() == []
        assert not self.server.store.registry.held_bytes
        await self.control("/resume_memory_occupation", TAGS)
        await self.control("/continue_generation", {})

    async def converse(self, *, switching: bool, turns: int = 3, seed: int = 5) -> Conversation:
        """Three sessions that grow turn by turn; a switch away and back after each of their turns, if at all."""
        draw = random.Random(seed)
        sessions = [[draw.randrange(4, 420) for _ in range(tokens)] for tokens in FIRST_PROMPTS]
        talk = Conversation()
        for _ in range(turns):
            for tokens in sessions:
                status, said = await self.generate(tokens, 12)
                assert status == 200, said
                details = said["meta_info"].get("cached_tokens_details") or {}
                talk.restored_tokens.append(details.get("host", 0))
                talk.outputs.append(said["output_ids"])
                tokens += said["output_ids"] + [draw.randrange(4, 420) for _ in range(7)]
                assert self.server.store.audit() == []
            if switching:
                await self.switch_away_and_back()
        return talk


class Conversation:
    def __init__(self) -> None:
        self.outputs: list[list[int]] = []
        self.restored_tokens: list[int] = []


@asynccontextmanager
async def pooled(settings: config.Engine, model: Path, directory: Path, tp: int = 1) -> AsyncIterator[Pooled]:
    """The engine starts and stops in a thread: its pool needs the event loop meanwhile."""
    server, fault = MemoryServer(POOL_BYTES, tp, SLAB_BYTES), directory / "fault"
    await server.start(directory / "memory.sock")
    variables = {**environment(settings, fault, tp), protocol.SOCKET_VARIABLE: str(server.path)}
    starting = running_engine(settings.model_copy(update={"environment": variables}), model, directory, tp=tp, arguments=ARGUMENTS)
    engine = await asyncio.to_thread(starting.__enter__)
    try:
        async with aiohttp.ClientSession(engine.url, timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
            yield Pooled(engine, server, http, fault)
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
        await server.stop()
