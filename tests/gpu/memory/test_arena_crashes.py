"""Ranks that die in the middle of a switch between real engines: what the other model has is intact, and the dead one is opened again."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.engine.engine import EngineState
from talaria.gpu.engine.errors import SwitchFailed
from tests.gpu.memory.shared import Call, Shared, shared, wrong

MODELS = ("qwen3", "llama")
POOL_BYTES = 32 * 2**20
LONG = [*range(4, 204)]
"""A prompt of twelve whole pages."""
PATIENCE_S = 60.0


def images(pair: Shared) -> dict[tuple[str, int], int]:
    return {key: zlib.crc32(os.pread(descriptor, nbytes, 0)) for key, (descriptor, nbytes) in pair.arenas.images.items()}


class Talk:
    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {model: [] for model in MODELS}

    async def ask(self, pair: Shared) -> int:
        """The same prompt of the active model; tokens of it that came back from the host."""
        model = pair.active
        assert model is not None
        said = await pair.generate(model, LONG, 16)
        self.calls[model].append((LONG, said["output_ids"]))
        return int((said["meta_info"].get("cached_tokens_details") or {}).get("host", 0))


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "fault", "victim"), [(1, "hidden", "qwen3"), (1, "copied", "llama"), (2, "teardown 1", "qwen3"), (2, "taken 1", "llama")]
)
def test_a_rank_that_dies_in_a_switch_takes_nothing_else_with_it(
    cpu_engine: config.Engine, tiny_models: Path, engine_python: str, tmp_path: Path, tp: int, fault: str, victim: str
) -> None:
    talk = Talk()
    survivor = next(model for model in MODELS if model != victim)

    async def main() -> None:
        async with shared(cpu_engine, {name: tiny_models / name for name in MODELS}, tmp_path, tp=tp, pool_bytes=POOL_BYTES * tp) as pair:
            assert await talk.ask(pair) == 0
            await pair.switch("llama")
            assert await talk.ask(pair) == 0
            await pair.switch("qwen3")
            assert await talk.ask(pair) == 192
            kept = images(pair)
            pair.fault.write_text(fault)
            try:
                await pair.switch("llama")
            except SwitchFailed as error:
                assert victim in str(error)
            else:
                assert "teardown" in fault, "rank 0 may answer before the other's death is heard; then the next model serves"
            pair.fault.write_text("")
            async with asyncio.timeout(PATIENCE_S):
                while pair.engines.engines[victim].state is not EngineState.FAILED or len(pair.arenas.ranks) != tp:
                    await asyncio.sleep(0.01)
                while pair.active != survivor and any(pair.arenas.owners()):
                    await asyncio.sleep(0.01)
            assert images(pair) == kept
            assert pair.memory is not None and pair.memory.store.audit() == [] and not pair.memory.store.registry.held_bytes
            if pair.active != survivor:
                assert (await pair.switch(survivor)).path == "h2d"
            assert await talk.ask(pair) == 192, "the survivor's KV was lost"
            assert (await pair.switch(victim)).path == "open"
            assert await talk.ask(pair) == 192, "the victim's KV was lost"
            assert images(pair) == kept
            await pair.switch(survivor)
            await talk.ask(pair)

    asyncio.run(main())
    for model, calls in talk.calls.items():
        assert wrong(engine_python, tiny_models / model, calls) == []
