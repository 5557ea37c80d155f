"""Whatever happens in whatever order to two real models in one arena with one host pool, no answer changes and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from talaria.gpu import config
from tests.gpu.memory.shared import Call, Shared, shared, wrong

SESSIONS, STEPS, KV_TOKENS = 4, 60, 2048
POOL_BYTES = 3 * 2**20
"""On each rank; the sessions have more pages than that."""
BYTES_PER_S = 50e6
PATIENCE_S = 60.0


class World:
    """One run, and what it has to show at its end."""

    def __init__(self, pair: Shared, tp: int, models: tuple[str, str], draw: random.Random) -> None:
        self.pair, self.tp, self.models, self.draw = pair, tp, models, draw
        self.calls: dict[str, list[Call]] = {model: [] for model in models}
        self.sessions = {model: [self.some(20, 120) for _ in range(SESSIONS)] for model in models}
        self.paths: Counter[str] = Counter()
        self.restored_tokens = 0
        self.images = self.image_sums()

    def some(self, least: int, most: int) -> list[int]:
        return [self.draw.randrange(4, 420) for _ in range(self.draw.randint(least, most))]

    def image_sums(self) -> dict[tuple[str, int], int]:
        images = self.pair.arenas.images
        return {key: zlib.crc32(os.pread(descriptor, nbytes, 0)) for key, (descriptor, nbytes) in images.items()}

    @property
    def active(self) -> str:
        assert self.pair.active is not None
        return self.pair.active

    @property
    def other(self) -> str:
        return next(model for model in self.models if model != self.active)

    # --- steps -------------------------------------------------------------------------------------------------------

    async def call(self) -> None:
        """Some sessions of the active model go on, at the same time; one that has become long begins anew."""
        model = self.active
        numbers = self.draw.sample(range(SESSIONS), self.draw.randint(1, SESSIONS))
        for number in numbers:
            tokens = self.sessions[model][number]
            self.sessions[model][number] = tokens + self.some(1, 40) if len(tokens) < KV_TOKENS // 6 else self.some(20, 120)
        answers = await asyncio.gather(
            *(self.pair.generate(model, self.sessions[model][number], self.draw.randint(1, 20)) for number in numbers)
        )
        for number, said in zip(numbers, answers, strict=True):
            self.calls[model].append((list(self.sessions[model][number]), said["output_ids"]))
            self.sessions[model][number] += said["output_ids"]
            self.restored_tokens += (said["meta_info"].get("cached_tokens_details") or {}).get("host", 0)

    async def switch(self) -> None:
        target = self.other
        staged = self.pair.engines.staged()
        times = await self.pair.switch(target)
        self.paths[times.path] += 1
        weights = self.pair.weight_bytes(target)
        assert times.h2d_bytes is not None
        assert (times.path == "h2d") == (times.d2d_bytes == 0) and (times.path == "d2d") == (times.h2d_bytes == 0)
        assert times.d2d_bytes <= weights and times.h2d_bytes <= weights <= times.d2d_bytes + times.h2d_bytes, "a rank moved too little"
        assert self.tp > 1 or weights == times.d2d_bytes + times.h2d_bytes
        assert staged.target in ("", target)
        memory = self.pair.memory
        assert memory is not None and not memory.store.registry.held_bytes, "copies were under way behind the barrier"

    async def stage(self) -> None:
        self.pair.engines.stage(self.other, self.draw.choice((0.02, 0.2, 1.0)))

    async def stage_whole(self) -> None:
        self.pair.engines.stage(self.other, 1.0)
        async with asyncio.timeout(PATIENCE_S):
            while (staged := self.pair.engines.staged()).coverage < 1.0 and staged.slack_bytes > 0:
                await asyncio.sleep(0.02)

    async def unstage(self) -> None:
        self.pair.engines.unstage()

    async def lag(self) -> None:
        """Rank 1 knows less of the host's pool from now on, or as much as ever."""
        self.pair.fault.write_text("" if self.pair.fault.read_text() else "lag")

    async def flush(self) -> None:
        await self.pair.engines.flush(self.active)

    def step(self) -> Callable[[], Awaitable[None]]:
        kinds = {self.call: 8, self.switch: 4, self.stage: 3, self.stage_whole: 2, self.unstage: 1, self.lag: 1, self.flush: 1}
        return self.draw.choices(list(kinds), list(kinds.values()))[0]

    # --- what holds at every step --------------------------------------------------------------------------------------

    def check(self) -> None:
        memory = self.pair.memory
        assert memory is not None
        assert memory.store.audit() == []
        assert set(self.pair.arenas.owners()) == {self.active}
        assert not any(arena.waiting for arena in self.pair.arenas.arenas)
        assert len(self.pair.arenas.ranks) == self.tp * len(self.models)
        assert self.pair.downs == []
        staged = self.pair.engines.staged()
        assert 0 <= staged.clean_bytes <= staged.weight_bytes and 0 <= staged.dirty_bytes <= staged.weight_bytes
        assert self.image_sums() == self.images


def left_behind() -> dict[str, object]:
    """What a run could leave on this machine, as far as it has a name of ours or of SGLang."""
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return {
        "memory": sorted(name for name in files if "memfd:" in name),
        "sockets": sum("socket:" in name for name in files),
        "mapped": sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def alive(groups: list[int]) -> list[int]:
    """Process groups that still have a process."""
    found = []
    for group in groups:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            continue
        found.append(group)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("tp", "models"), [(1, ("qwen3", "llama")), (2, ("qwen3", "llama")), (1, ("llama", "deepseek"))])
def test_no_answer_ever_changes(
    cpu_engine: config.Engine, tiny_models: Path, engine_python: str, tmp_path: Path, tp: int, models: tuple[str, str]
) -> None:
    async def main() -> tuple[World, list[int]]:
        async with shared(
            cpu_engine, {name: tiny_models / name for name in models}, tmp_path, tp=tp, kv_tokens=KV_TOKENS, pool_bytes=POOL_BYTES * tp,
            staging_bytes_per_s=BYTES_PER_S,
        ) as pair:  # fmt: skip
            world = World(pair, tp, models, random.Random(tp))
            groups = [engine.pid for engine in pair.engines.engines.values() if engine.pid is not None]
            for number in range(STEPS):
                await world.step()()
                world.check()
                if number % 20 == 19:  # whatever was drawn: each path is taken
                    await world.stage_whole()
                    await world.switch()
                    await world.call()
                    world.check()
            await world.switch()
            await world.call()
            return world, groups

    before = left_behind()
    world, groups = asyncio.run(main())
    assert left_behind() == before and alive(groups) == []
    assert world.paths["d2d"] + world.paths["partial"] and world.paths["h2d"], world.paths
    assert world.restored_tokens > 0
    for model, calls in world.calls.items():
        assert len(calls) > 10
        assert wrong(engine_python, tiny_models / model, calls) == []
