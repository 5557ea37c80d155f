"""On real engines: two models in one arena answer as if each had its own memory, whatever lies behind their windows in between."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.engine.errors import SwitchFailed
from talaria.gpu.engine.switch import SwitchTimes
from tests.gpu.memory.shared import Call, Shared, shared, wrong

TWO_RANKS = pytest.param(2, marks=pytest.mark.full)
MODELS = ("qwen3", "llama")


def prompts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(4, 420) for _ in range(draw.randrange(20, 200))] for _ in range(count)]


class Calls:
    """What engines were asked and said, by model."""

    def __init__(self) -> None:
        self.made: dict[str, list[Call]] = {}

    async def ask(self, pair: Shared, asked: Sequence[list[int]]) -> None:
        model = pair.active
        assert model is not None
        for prompt in asked:
            output = (await pair.generate(model, prompt, 12))["output_ids"]
            self.made.setdefault(model, []).append((prompt, output))

    def are_right(self, python: str, models: Path) -> None:
        for model, calls in self.made.items():
            assert wrong(python, models / model, calls) == []


def check_times(pair: Shared, target: str, times: SwitchTimes) -> None:
    """Nothing is staged, so everything comes from the image."""
    assert (times.path, times.h2d_bytes, times.d2d_bytes) == ("h2d", pair.weight_bytes(target), 0)
    assert (times.coverage, times.dirty) == (0.0, 0.0)
    assert all(phase_s > 0 for phase_s in times.phases_s[1:])
    assert set(pair.arenas.owners()) == {target}


@pytest.mark.parametrize("tp", [1, TWO_RANKS])
def test_two_models_in_one_arena_answer_as_if_each_were_alone(
    cpu_engine: config.Engine, tiny_models: Path, engine_python: str, tmp_path: Path, tp: int
) -> None:
    calls = Calls()

    async def main() -> None:
        async with shared(cpu_engine, {name: tiny_models / name for name in MODELS}, tmp_path, tp=tp) as pair:
            await calls.ask(pair, prompts(0, 3))
            for number in range(1, 7):
                target = MODELS[number % 2]
                check_times(pair, target, await pair.switch(target))
                await calls.ask(pair, prompts(number, 3))
            pair.fault.write_text("idle")  # the control: with a mover that copies nothing this test fails
            with pytest.raises(SwitchFailed):
                await pair.switch("llama")
            assert "weights differ from their image" in log(cpu_engine, "llama")
            pair.fault.write_text("")
            check_times(pair, "qwen3", await pair.switch("qwen3"))
            await calls.ask(pair, prompts(7, 3))

    asyncio.run(main())
    calls.are_right(engine_python, tiny_models)
    for model in MODELS:  # the table of 16 requests' tokens, and nothing of what CPUs make beside it
        found = re.search(r"MiB of weights, [\d.]+ of KV, ([\d.]+) of runtime buffers in an arena", log(cpu_engine, model))
        assert found is not None and 16 <= float(found[1]) * 2**20 / (32_768 * 4) < 18
    assert [name for name in os.listdir("/dev/shm") if name.startswith("talaria")] == []


def log(settings: config.Engine, model: str) -> str:
    return (Path(settings.log_dir) / f"g0-{model}.log").read_text(errors="replace")


@pytest.mark.full
def test_models_of_hundreds_of_megabytes_are_copied_whole(
    cpu_engine: config.Engine, large_model: Path, tiny_models: Path, engine_python: str, tmp_path: Path
) -> None:
    """And without checks, a mover that copies nothing gives other answers."""
    calls, idle = Calls(), Calls()
    models = {"llama": tiny_models / "llama", "large": large_model}

    async def main() -> None:
        async with shared(cpu_engine, models, tmp_path, managed_gib=0.5, chunk_kib=1024) as pair:
            assert pair.weight_bytes("large") >= 200 * 10**6
            for target in ("large", "llama", "large"):
                check_times(pair, target, await pair.switch(target))
                await calls.ask(pair, prompts(1, 2))
        async with shared(cpu_engine, models, tmp_path, managed_gib=0.5, chunk_kib=1024, check=False) as pair:
            for target in ("large", "llama", "large"):
                check_times(pair, target, await pair.switch(target))
                await calls.ask(pair, prompts(2, 2))
            pair.fault.write_text("idle")
            await pair.switch("llama")
            await idle.ask(pair, prompts(3, 2))

    asyncio.run(main())
    assert wrong(engine_python, models["llama"], calls.made["llama"]) == wrong(engine_python, large_model, calls.made["large"]) == []
    assert wrong(engine_python, models["llama"], idle.made["llama"]) == [0, 1]


PLATFORMS = """
import ctypes, pkgutil, torch
from talaria.gpu import plugin
from talaria.gpu.hooks import arena, pools

assert plugin.platform() == "talaria.gpu.hooks.platform:CpuArenaPlatform"
from sglang.srt.platforms import current_platform
assert type(current_platform).__name__ == "CpuArenaPlatform"
cuda = pkgutil.resolve_name("talaria.gpu.hooks.platform:CudaArenaPlatform")
assert cuda._enum.name == "CUDA" and pools.in_arena("dsa") is None


class Attached:
    device = torch.device("cpu")

    def carve(self, count, nbytes, page_bytes):
        assert (count, nbytes, page_bytes) == (2, 272 * 40 * 4, 16 * 40 * 4)
        self.memory = [(ctypes.c_ubyte * nbytes)() for _ in range(count)]
        return [ctypes.addressof(fragment) for fragment in self.memory]


attached = arena.attached = Attached()
pool = pools.in_arena("mla")(
    size=256, page_size=16, dtype=torch.float32, kv_lora_rank=32, qk_rope_head_dim=8, layer_num=2, device="cpu", enable_memory_saver=False
)
pool.kv_buffer[1][3] = 1.5
assert bytes(attached.memory[1])[3 * 160 : 3 * 160 + 4] == b"\\0\\0\\xc0?" and attached.kv_buffers()[1] is pool.kv_buffer[1]
"""


def test_both_devices_platforms_import_without_a_device_and_latent_pools_lie_in_an_arena(cpu_engine: config.Engine) -> None:
    assert cpu_engine.python is not None
    variables = {**os.environ, **cpu_engine.environment, "TALARIA_ARENA_SOCKET": "/nowhere"}
    done = subprocess.run([cpu_engine.python, "-c", PLATFORMS], env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
