"""On real engines: two models in one arena answer as if each had its own memory, whatever lies behind their windows in between."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from talaria.gpu import config
from tests.gpu.memory.shared import shared

TWO_RANKS = pytest.param(2, marks=pytest.mark.full)
MODELS = ("qwen3", "llama")


@pytest.mark.parametrize("tp", [1, TWO_RANKS])
def test_two_models_in_one_arena_answer_as_if_each_were_alone(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path, tp: int
) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 420) for _ in range(draw.randrange(20, 200))] for _ in range(4)]

    async def main() -> None:
        async with shared(cpu_engine, {name: tiny_models / name for name in MODELS}, tmp_path, tp=tp) as pair:
            assert pair.active == "qwen3", (tmp_path, pair.downs)
            alone = {model: [] for model in MODELS}
            for number in range(6):
                model = MODELS[number % 2]
                if model != pair.active:
                    times = await pair.switch(model)
                    print(times)
                said = [(await pair.generate(model, prompt, 12))["output_ids"] for prompt in prompts]
                alone[model].append(said)
            for model in MODELS:
                assert alone[model][0] == alone[model][1] == alone[model][2]
            print(alone)

    asyncio.run(main())
