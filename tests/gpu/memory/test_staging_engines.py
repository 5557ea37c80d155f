"""Staging on real engines: while one model answers, the other's weights come to its free KV, and a switch reads the rest from the host.

The engines compare the weights with their image at every switch, and free KV is no number then: a chunk that was written over, or is not
where it should be, ends the test.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.agent.host import Staged
from talaria.gpu.engine.switch import SwitchTimes
from talaria.gpu.memory.arenas import RankTimes
from tests.gpu.memory.shared import Shared, shared

TWO_RANKS = pytest.param(2, marks=pytest.mark.full)
MODELS = ("qwen3", "llama")
KV_TOKENS, OUTPUT = 8192, 12
"""A rank's KV has room for the other model's weights, with what it knows of positions."""
BYTES_PER_S, SLOW_S = 4e6, 30.0
POLL_S, PATIENCE_S = 0.05, 120.0


class Pair:
    """Two models whose answers are known from before anything was staged."""

    def __init__(self, engines: Shared, tp: int) -> None:
        self.engines, self.tp = engines, tp
        draw = random.Random(5)
        self.prompts = [[draw.randrange(4, 420) for _ in range(length)] for length in (30, 200, 77)]
        self.kv_tokens = KV_TOKENS * tp
        self.long = [draw.randrange(4, 420) for _ in range(self.kv_tokens)]
        self.known: dict[str, list[list[int]]] = {}
        self.paths: list[str] = []
        self.ranks: list[RankTimes] = []
        """Of the last switch; ranks go around different chunks, so they need not have staged the same."""

    async def learn(self) -> None:
        for model in MODELS:
            if model != self.engines.active:
                times = await self.engines.switch(model)
                assert (times.path, times.d2d_bytes, times.coverage) == ("h2d", 0, 0.0)
                assert times.h2d_bytes == self.weight_bytes(model)
            self.known[model] = [await self.says(model, prompt) for prompt in self.prompts]

    async def says(self, model: str, prompt: list[int]) -> list[int]:
        output: list[int] = (await self.engines.generate(model, prompt, OUTPUT))["output_ids"]
        return output

    async def answers_as_ever(self) -> None:
        model = self.engines.active
        assert model is not None
        assert [await self.says(model, prompt) for prompt in self.prompts] == self.known[model]

    def weight_bytes(self, model: str) -> int:
        """On each rank, which have equal parts."""
        (nbytes,) = {nbytes for (name, _), (_, nbytes) in self.engines.arenas.images.items() if name == model}
        return nbytes

    async def until(self, condition: Callable[[Staged], bool]) -> Staged:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(staged := self.engines.engines.staged()):
                assert not self.engines.downs
                await asyncio.sleep(POLL_S)
            return staged

    async def staged_whole(self, model: str) -> None:
        self.engines.engines.stage(model, 1.0)
        staged = await self.until(lambda staged: staged.coverage == 1.0)
        assert (staged.target, staged.dirty_bytes) == (model, 0)
        assert staged.clean_bytes == staged.weight_bytes == self.tp * self.weight_bytes(model)

    async def switch(self) -> SwitchTimes:
        target = next(model for model in MODELS if model != self.engines.active)
        times = await self.engines.switch(target)
        self.paths.append(times.path)
        self.ranks = await self.engines.arenas.switched(target)
        assert len(self.ranks) == self.tp
        for rank in self.ranks:
            assert rank.record.d2d_bytes + rank.record.h2d_bytes == self.weight_bytes(target)
        await self.answers_as_ever()
        return times


@pytest.mark.parametrize("tp", [1, TWO_RANKS])
def test_a_switch_reads_from_the_host_what_is_not_staged_and_what_was_written_over(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, tp: int
) -> None:
    async def main() -> None:
        models = {name: tiny_models / name for name in MODELS}
        async with shared(cpu_engine, models, tmp_path, tp=tp, kv_tokens=KV_TOKENS * tp, staging_bytes_per_s=BYTES_PER_S) as engines:
            pair = Pair(engines, tp)
            await pair.learn()
            await staging_goes_on_beside_calls(pair)
            await whole(pair)
            await partly_written_over(pair)
            await wholly_written_over(pair)
            await given_up(pair)
            assert set(pair.paths) == {"d2d", "partial", "h2d"}

    asyncio.run(main())


async def staging_goes_on_beside_calls(pair: Pair) -> None:
    """Slowly, so that calls come and go meanwhile; then at once."""
    other = MODELS[0]
    assert pair.engines.active == MODELS[1]
    pair.engines.engines.stage(other, pair.weight_bytes(other) / (SLOW_S * BYTES_PER_S))
    began = await pair.until(lambda staged: staged.coverage > 0.0)
    assert began.coverage < 1.0
    async with asyncio.timeout(PATIENCE_S):
        while pair.engines.engines.staged().coverage <= began.coverage:
            await pair.answers_as_ever()


async def whole(pair: Pair) -> None:
    """Nothing comes from the host."""
    for _ in range(2):
        await pair.staged_whole(next(model for model in MODELS if model != pair.engines.active))
        times = await pair.switch()
        assert (times.path, times.h2d_bytes, times.coverage, times.dirty) == ("d2d", 0, 1.0, 0.0)


async def partly_written_over(pair: Pair) -> None:
    """A long prompt takes pages that hold staged chunks; its prefix stays in the cache, so they are not staged again."""
    times = await written_over(pair, 0.73)
    assert times.path == "partial" and 0.0 < times.dirty < 1.0


async def wholly_written_over(pair: Pair) -> None:
    """What is full has no clean tail to speak of."""
    times = await written_over(pair, 0.98)
    assert times.dirty > 0.8


async def written_over(pair: Pair, share: float) -> SwitchTimes:
    source = pair.engines.active
    assert source is not None
    target = next(model for model in MODELS if model != source)
    await pair.staged_whole(target)
    await pair.engines.generate(source, pair.long[: int(share * pair.kv_tokens)], OUTPUT)
    await pair.until(lambda staged: staged.dirty_bytes > 0)
    times = await pair.switch()
    assert all(rank.record.h2d_bytes == rank.dirty_bytes > 0 for rank in pair.ranks), "all that was lost, and nothing else"
    return times


async def given_up(pair: Pair) -> None:
    target = next(model for model in MODELS if model != pair.engines.active)
    await pair.staged_whole(target)
    pair.engines.engines.unstage()
    times = await pair.switch()
    assert (times.path, times.d2d_bytes, times.dirty) == ("h2d", 0, 0.0)
