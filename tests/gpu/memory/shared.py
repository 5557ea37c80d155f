"""For tests of the arena: real engines of two models that share one, checked at every switch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from talaria.gpu import config
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.engine.supervisor import Supervisor
from talaria.gpu.engine.switch import SwitchTimes
from talaria.gpu.memory.arenas import Arenas

PATIENCE_S = 240.0
MIB = 2**20
CHUNK_KIB = 16


class Shared:
    """The engines of one instance, of which one is active."""

    def __init__(self, engines: Supervisor, arenas: Arenas, http: aiohttp.ClientSession, downs: list[tuple[str, str]]) -> None:
        self.engines, self.arenas, self.downs = engines, arenas, downs
        self._http = http

    @property
    def active(self) -> str | None:
        return next((name for name, engine in self.engines.engines.items() if engine.state.value == "active"), None)

    async def generate(self, model: str, tokens: list[int], count: int) -> dict[str, Any]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}
        async with self._http.post(self.engines.url(model) + "/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            said: dict[str, Any] = await answer.json()
            return said

    async def switch(self, target: str) -> SwitchTimes:
        return await self.engines.switch(self.active, target)


def bound(settings: config.Engine, tp: int, **more: str) -> config.Engine:
    """With a core for each rank."""
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(tp))} if tp > 1 else {}
    return settings.model_copy(update={"environment": {**settings.environment, **bind, **more}})


@asynccontextmanager
async def shared(
    settings: config.Engine, models: Mapping[str, Path], directory: Path, *, tp: int = 1, managed_gib: float = 0.03, check: bool = True,
    chunk_kib: int = CHUNK_KIB, kv_tokens: int = 4096,
) -> AsyncIterator[Shared]:  # fmt: skip
    """The engines start one after the other; the first model is active."""
    setting = config.Arena(managed_gib=managed_gib, chunk_kib=chunk_kib, check=check)
    instance = config.Instance(name="g0", models=tuple(models), tp=tp, max_running=16, arena=setting)
    known = {name: config.Model(path=str(path), kv_tokens=kv_tokens) for name, path in models.items()}
    downs: list[tuple[str, str]] = []
    holds = HoldServer(lambda model, message: None, lambda model: None)
    arenas = Arenas(tp, setting.chunks, setting.chunk_bytes, check=check)
    engines = Supervisor(
        known, instance, bound(settings, tp), holds, lambda model, why: downs.append((model, why)), arenas=arenas
    )
    await holds.start(directory / "holds")
    await arenas.start(directory / "arena")
    try:
        await engines.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
            yield Shared(engines, arenas, http, downs)
    finally:
        await engines.stop()
        await arenas.stop()
        await holds.stop()
