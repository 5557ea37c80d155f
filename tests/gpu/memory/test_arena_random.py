"""Whatever happens in whatever order to two real models in one arena with one host pool, no answer changes and nothing is left behind.

Every message of a rank is judged by ``witness``; engines compare their weights with the image at every switch, and find no number in KV
that was given up by a switch or a flush. SGLang itself ends an idle engine that has lost a page.
"""

from __future__ import annotations

import asyncio
import os
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.engine.errors import SwitchFailed
from talaria.substrate.switch import SwitchRecord
from tests.gpu.memory import traces
from tests.gpu.memory.bystander import MODEL as BYSTANDER
from tests.gpu.memory.bystander import Bystander
from tests.gpu.memory.calm import unlike
from tests.gpu.memory.shared import Call, Shared, shared, wrong
from tests.gpu.memory.witness import Witness

SESSIONS, STEPS, KV_TOKENS = 4, 80, 2048
POOL_BYTES = 5 * 2**18
"""The sessions have more pages than that."""
BYTES_PER_S = 50e6
PATIENCE_S = 60.0
PAGE_TOKENS, LAG_PAGES = 16, 2
"""As in ``talaria_linkers``."""


class World:
    """One run, and what it has to show at its end."""

    def __init__(self, pair: Shared, tp: int, models: tuple[str, str], draw: random.Random, *, faulty: bool) -> None:
        assert pair.memory is not None
        self.pair, self.tp, self.models, self.draw, self.faulty = pair, tp, models, draw, faulty
        self.witness = Witness(pair.memory, LAG_PAGES, BYSTANDER)
        self.witness.watch(pair.arenas)
        self.bystander = Bystander(pair.memory, draw)
        self.calls: dict[str, list[Call]] = {model: [] for model in models}
        self.returned: dict[str, list[int]] = {model: [] for model in models}
        """Calls of which something came back from the host."""
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

    # --- calls ---------------------------------------------------------------------------------------------------------

    async def call(self) -> None:
        """Some sessions of the active model go on, at the same time; one that has become long begins anew."""
        model = self.active
        numbers = self.draw.sample(range(SESSIONS), self.draw.randint(1, SESSIONS))
        for number in numbers:
            tokens = self.sessions[model][number]
            self.sessions[model][number] = tokens + self.some(1, 40) if len(tokens) < KV_TOKENS // 6 else self.some(20, 120)
        outputs = await self.ask(model, [(self.sessions[model][number], self.draw.randint(1, 20)) for number in numbers])
        for number, output in zip(numbers, outputs, strict=True):
            self.sessions[model][number] += output

    async def ask(self, model: str, asked: list[tuple[list[int], int]]) -> list[list[int]]:
        answers = await asyncio.gather(*(self.pair.generate(model, tokens, count) for tokens, count in asked))
        for (tokens, _), said in zip(asked, answers, strict=True):
            if restored := (said["meta_info"].get("cached_tokens_details") or {}).get("host", 0):
                self.restored_tokens += restored
                self.returned[model].append(len(self.calls[model]))
            self.calls[model].append((list(tokens), said["output_ids"]))
        return [said["output_ids"] for said in answers]

    async def fill_device(self) -> None:
        """A prompt that leaves little room for the prefixes of others, nor for what is staged."""
        await self.ask(self.active, [(self.some(KV_TOKENS * 5 // 8, KV_TOKENS * 7 // 8), 2)])

    async def gap(self) -> None:
        """Long enough for all that has been said to be kept on the host."""
        await self.until(lambda: self.witness.quiet(self.active))

    async def flush(self) -> None:
        await self.pair.engines.flush(self.active)

    # --- switches ------------------------------------------------------------------------------------------------------

    async def switch(self) -> None:
        target = self.other
        staged = self.pair.engines.staged()
        times = await self.pair.switch(target)
        self.paths[times.path] += 1
        weights = self.pair.weight_bytes(target)
        ranks = await self.pair.arenas.switched(target)
        assert len(ranks) == self.tp
        for rank in ranks:
            assert rank.record.d2d_bytes + rank.record.h2d_bytes == weights, "a rank moved too little, or too much"
            assert rank.dirty_bytes <= rank.record.h2d_bytes and rank.record.path == path_of(rank.record)
        assert times.d2d_bytes == max(rank.record.d2d_bytes for rank in ranks)
        assert staged.target in ("", target)

    async def stage(self) -> None:
        self.pair.engines.stage(self.other, self.draw.choice((0.02, 0.2, 1.0)))

    async def stage_whole(self) -> None:
        self.pair.engines.stage(self.other, 1.0)
        await self.until(lambda: (staged := self.pair.engines.staged()).coverage == 1.0 or (staged.target and staged.slack_bytes == 0))

    async def unstage(self) -> None:
        self.pair.engines.unstage()

    # --- the host pool ---------------------------------------------------------------------------------------------------

    async def lag(self) -> None:
        """Rank 1 knows less of the host's pool from now on, copies to it more slowly, or neither."""
        self.tell(self.draw.choice(("lag", "late", "")))

    async def lag_behind(self) -> None:
        self.tell("lag")

    def tell(self, fault: str) -> None:
        if not self.faulty:  # else the test has its own
            self.witness.lags = fault == "lag"
            self.pair.fault.write_text(fault)

    async def evict(self) -> None:
        """Others come into the pool, so that the least recently used have to go."""
        if self.bystander.copying:
            await self.bystander.end()
        await self.bystander.crowd(self.draw.randint(4, 24))

    async def copy_beside(self) -> None:
        """Copies of a third model begin, or go on to their end."""
        if self.bystander.copying:
            await self.bystander.end()
        else:
            self.bystander.begin()

    async def begin_beside(self) -> None:
        if not self.bystander.copying:
            self.bystander.begin()

    async def come_back(self) -> None:
        if not self.bystander.copying:
            await self.bystander.come_back()

    async def keep(self) -> None:
        """A pin on what is published of some path, and a reference on some other one, from now on."""
        for pinned in (True, False):
            self.witness.keep(self.witness.name(self.draw.choice(self.models)), self.draw.randrange(1000), pinned=pinned)

    async def let_go(self) -> None:
        self.witness.let_go()

    async def forget(self) -> None:
        """As ``POST /admin/reset`` does."""
        self.pair.engines.forget_host_kv()

    # --- all of them -------------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert self.pair.downs == []
                await asyncio.sleep(0.02)

    def step(self) -> Callable[[], Awaitable[None]]:
        kinds = {
            self.call: 12, self.fill_device: 1, self.gap: 2, self.flush: 1, self.switch: 6, self.stage: 3, self.stage_whole: 2,
            self.unstage: 1, self.lag: 2, self.evict: 2, self.copy_beside: 3, self.come_back: 1, self.keep: 2, self.let_go: 2,
        }  # fmt: skip
        return self.draw.choices(list(kinds), list(kinds.values()))[0]

    async def walk(self, steps: int) -> None:
        """Whatever is drawn; then, behind a reset, everything that a run has to see."""
        for _ in range(steps):
            await self.take(self.step())
        for step in (
            self.forget, self.call, self.gap, self.keep, self.stage_whole, self.switch, self.call, self.gap,
            self.begin_beside, self.unstage, self.lag_behind, self.switch, self.call,
            self.evict, self.come_back, self.let_go, self.switch, self.call, self.lag,
        ):  # fmt: skip
            await self.take(step)

    async def take(self, step: Callable[[], Awaitable[None]]) -> None:
        await step()
        self.check()

    def check(self) -> None:
        """What holds at every step."""
        self.witness.check()
        assert set(self.pair.arenas.owners()) == {self.active}
        assert not any(arena.waiting for arena in self.pair.arenas.arenas)
        assert len(self.pair.arenas.ranks) == self.tp * len(self.models)
        assert self.pair.downs == []
        staged = self.pair.engines.staged()
        assert 0 <= staged.clean_bytes <= staged.weight_bytes and 0 <= staged.dirty_bytes <= staged.weight_bytes
        assert self.image_sums() == self.images

    async def close(self) -> None:
        """Everything has an end: engines, the bystander, and what they had in the pool."""
        self.witness.let_go()
        if self.bystander.copying:
            await self.bystander.end()
        await self.bystander.leave()
        await self.pair.engines.stop()
        await self.until(lambda: self.witness.idle() and not any(self.pair.arenas.owners()))
        self.witness.check_idle()
        assert not self.pair.arenas.ranks

    def has_seen_everything(self) -> None:
        """The run was about what it is for."""
        seen, paths = self.witness.seen, self.paths
        assert paths["d2d"] + paths["partial"] and paths["h2d"], paths
        assert self.restored_tokens > 0 and all(self.returned.values()) and all(len(calls) > 10 for calls in self.calls.values())
        for model in (*self.models, BYSTANDER):
            assert seen[f"pages restored of {model}"] and seen[f"pages evicted of {model}"], (model, seen)
        restored_pages = sum(seen[f"pages restored of {model}"] for model in self.models)
        assert restored_pages * PAGE_TOKENS == self.restored_tokens, "what SGLang was told is not what ranks agreed on"
        for name in ("pins alone", "references alone", "releases beside other models' copies"):
            assert seen[name], (name, seen)
        assert self.tp == 1 or seen["ranks of unequal knowledge"], seen


def path_of(record: SwitchRecord) -> str:
    return "h2d" if not record.d2d_bytes else "partial" if record.h2d_bytes else "d2d"


@asynccontextmanager
async def world(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, tp: int, models: tuple[str, str], fault: str = ""
) -> AsyncIterator[World]:
    async with shared(
        cpu_engine, {name: tiny_models / name for name in models}, tmp_path, tp=tp, kv_tokens=KV_TOKENS, pool_bytes=POOL_BYTES,
        staging_bytes_per_s=BYTES_PER_S,
    ) as pair:  # fmt: skip
        made = World(pair, tp, models, random.Random(tp), faulty=bool(fault))
        await made.bystander.join()
        pair.fault.write_text(fault)
        try:
            yield made
        finally:
            await made.bystander.leave()


@pytest.mark.full
@pytest.mark.parametrize(("tp", "models"), [(1, ("qwen3", "llama")), (2, ("qwen3", "llama")), (1, ("llama", "deepseek"))])
def test_no_answer_ever_changes(
    cpu_engine: config.Engine, tiny_models: Path, engine_python: str, tmp_path: Path, tp: int, models: tuple[str, str]
) -> None:
    async def main() -> World:
        async with world(cpu_engine, tiny_models, tmp_path, tp, models) as run:
            groups = [engine.pid for engine in run.pair.engines.engines.values() if engine.pid is not None]
            await run.walk(STEPS // 2)
            memory = traces.memory_files(groups)
            await run.walk(STEPS // 2)
            assert traces.memory_files(groups) == memory, "descriptors of memory come to be more"
            named = traces.shared_files(groups)
            await run.close()
            await run.until(lambda: not list(traces.processes(groups)))
            assert not any(os.path.exists(name) for name in named)
            return run

    before = traces.left_behind()
    run = asyncio.run(main())
    assert traces.left_behind() == before
    run.has_seen_everything()
    for model, calls in run.calls.items():
        assert asyncio.run(unlike(cpu_engine, tiny_models / model, tmp_path / model, tp, calls)) == []
        assert wrong(engine_python, tiny_models / model, calls) == []


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_a_mover_that_copies_nothing_fails_it(
    cpu_engine: config.Engine, tiny_models: Path, engine_python: str, tmp_path: Path, tp: int
) -> None:
    """Of KV: every call that found something on the host says something else. Of weights: the first switch does not come to its end.

    Nothing is drawn, so that what comes back always does so behind a switch, into pages that are poisoned.
    """

    async def main() -> World:
        async with world(cpu_engine, tiny_models, tmp_path, tp, ("qwen3", "llama"), "still") as run:
            for _ in range(2):
                await run.walk(0)
            run.pair.fault.write_text("idle")
            with pytest.raises(SwitchFailed):
                await run.switch()
            return run

    run = asyncio.run(main())
    for model, calls in run.calls.items():
        assert run.returned[model] and set(run.returned[model]) <= set(wrong(engine_python, tiny_models / model, calls))
