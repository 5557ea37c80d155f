"""For tests of the arena: real engines of two models that share one, checked at every switch, and what they should have said."""

from __future__ import annotations

import json
import math
import os
import subprocess
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
from talaria.gpu.memory.server import MemoryServer

PATIENCE_S = 240.0
CHUNK_KIB = 16
CPU = Path(__file__).resolve().parents[1] / "cpu"
LINKER = (
    "--unified-cache-external-linker-config", json.dumps({"linker": "ArenaLinker", "linker_module_path": "talaria_linkers"}),
)  # fmt: skip
SLAB_BYTES = 4096


class Shared:
    """The engines of one instance, of which one is active."""

    def __init__(
        self, engines: Supervisor, arenas: Arenas, memory: MemoryServer | None, http: aiohttp.ClientSession, fault: Path,
        downs: list[tuple[str, str]],
    ) -> None:  # fmt: skip
        self.engines, self.arenas, self.memory, self.fault, self.downs = engines, arenas, memory, fault, downs
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

    def weight_bytes(self, model: str) -> int:
        """Of its image on each rank; they have equal parts."""
        (nbytes,) = {nbytes for (name, _), (_, nbytes) in self.arenas.images.items() if name == model}
        return nbytes


def variables(settings: config.Engine, tp: int, fault: Path) -> dict[str, str]:
    """A core for each rank, and faults on demand."""
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(tp))} if tp > 1 else {}
    paths = os.pathsep.join([settings.environment["PYTHONPATH"], str(CPU / "faults"), str(CPU / "linkers")])
    return {**settings.environment, **bind, "PYTHONPATH": paths, "TALARIA_TEST_FAULT": str(fault)}


@asynccontextmanager
async def shared(
    settings: config.Engine, models: Mapping[str, Path], directory: Path, *, tp: int = 1, managed_gib: float = 0.03, check: bool = True,
    chunk_kib: int = CHUNK_KIB, kv_tokens: int = 4096, pool_bytes: int = 0, staging_bytes_per_s: float = math.inf,
) -> AsyncIterator[Shared]:  # fmt: skip
    """The engines start one after the other; the first model is active. With ``pool_bytes`` their KV is kept on the host, too."""
    setting = config.Arena(managed_gib=managed_gib, chunk_kib=chunk_kib, check=check)
    instance = config.Instance(name="g0", models=tuple(models), tp=tp, max_running=16, arena=setting)
    arguments = LINKER if pool_bytes else ()
    known = {name: config.Model(path=str(path), kv_tokens=kv_tokens, arguments=arguments) for name, path in models.items()}
    downs: list[tuple[str, str]] = []
    fault = directory / "fault"
    fault.write_text("")
    holds = HoldServer(lambda model, message: None, lambda model: None)
    arenas = Arenas(tp, setting.chunks, setting.chunk_bytes, check=check)
    memory = MemoryServer(pool_bytes, tp, SLAB_BYTES) if pool_bytes else None
    engines = Supervisor(
        known, instance, settings.model_copy(update={"environment": variables(settings, tp, fault)}), holds,
        lambda model, why: downs.append((model, why)), memory=memory, arenas=arenas, staging_bytes_per_s=staging_bytes_per_s,
    )  # fmt: skip
    await holds.start(directory / "holds")
    await arenas.start(directory / "arena")
    if memory is not None:
        await memory.start(directory / "memory")
    try:
        await engines.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
            yield Shared(engines, arenas, memory, http, fault, downs)
    finally:
        await engines.stop()
        await arenas.stop()
        if memory is not None:
            await memory.stop()
        await holds.stop()


Call = tuple[list[int], list[int]]
"""Prompt and output."""


def wrong(python: str, model: Path, calls: list[Call]) -> list[int]:
    """Which of the calls are not what the model says where nothing ever happens to it (``reference.py``)."""
    done = subprocess.run(
        [python, str(CPU / "reference.py"), str(model)], input="\n".join(map(json.dumps, calls)), capture_output=True, text=True,
        timeout=240, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(calls)
    return [number for number, right in enumerate(verdicts) if not right]
