"""Real SGLang engines on the CPU: two models take turns, calls survive, nothing else changes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from talaria.gpu import config
from talaria.gpu.engine.engine import Engine, EngineState
from talaria.gpu.engine.errors import Busy, EngineFailed
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.engine.supervisor import Supervisor
from talaria.gpu.kv.hashes import PageChain
from talaria.policy.snapshot import Residency

T = TypeVar("T")
KV_TOKENS = 20_000
PATIENCE_S = 600.0


class Pair:
    """Two engines, ``qwen3`` and ``llama``, in one event loop that runs while a test waits for something."""

    def __init__(self, models: Path, settings: config.Engine, directory: Path) -> None:
        self.downs: list[str] = []
        self.session: aiohttp.ClientSession | None = None
        self._runner = asyncio.Runner()
        names = ("qwen3", "llama")
        specs = {name: config.Model(path=str(models / name), kv_tokens=KV_TOKENS) for name in names}
        self.holds = HoldServer(lambda model, message: None, lambda model: None)
        self._socket = directory / "holds"
        instance = config.Instance(name="g0", models=names, max_running=16)
        self.group = Supervisor(specs, instance, settings, self.holds, lambda model, why: self.downs.append(model))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return self._runner.run(limited())

    async def start(self) -> None:
        self.session = aiohttp.ClientSession()
        await self.holds.start(self._socket)
        await self.group.start()

    async def stop(self) -> None:
        await self.group.stop()
        await self.holds.stop()
        if self.session is not None:
            await self.session.close()

    def close(self) -> None:
        try:
            self.run(self.stop())
        finally:
            self._runner.close()

    def engine(self, model: str) -> Engine:
        return self.group.engines[model]

    def active(self) -> str:
        return next(name for name in self.group.engines if self.group.residency(name) is Residency.ACTIVE)

    async def activate(self, model: str) -> None:
        if self.active() != model:
            await self.group.switch(self.active(), model)

    async def generate(self, model: str, prompt: list[int], tokens: int) -> tuple[list[int], int]:
        """Output of one greedy call, and how much of its prompt was cached."""
        assert self.session is not None
        limits = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": limits}
        async with self.session.post(self.group.url(model) + "/generate", json=body, raise_for_status=True) as answer:
            said = await answer.json()
        return said["output_ids"], said["meta_info"]["cached_tokens"]


@pytest.fixture(scope="module")
def pair(tiny_models: Path, cpu_engine: config.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tiny_models, cpu_engine, tmp_path_factory.mktemp("pair"))
    try:
        made.run(made.start())
        yield made
    finally:
        made.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def processes(engine: Engine) -> list[int]:
    """All processes of the engine's group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == engine.pid:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def cpu_s(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for _, *rest in fields for user, system in [rest[10:12]]) / os.sysconf("SC_CLK_TCK")


def test_the_first_model_serves_and_says_what_it_can(pair: Pair) -> None:
    assert [engine.state for engine in pair.group.engines.values()].count(EngineState.ACTIVE) == 1
    for name in pair.group.engines:
        limits = pair.group.limits(name)
        assert (limits.model, limits.page_tokens, limits.kv_tokens, limits.max_running) == (name, 16, KV_TOKENS, 16)
        assert limits.context_tokens == 32768


def test_no_key_is_left_in_the_log(pair: Pair, cpu_engine: config.Engine) -> None:
    for name in pair.group.engines:
        log = (Path(cpu_engine.log_dir) / f"g0-{name}.log").read_text()
        assert re.search(r"'admin_api_key': '\*+'", log)


def test_ten_switches_there_and_back_change_no_output(pair: Pair) -> None:
    prompts = [[(7 * i + j) % 400 + 4 for j in range(60 + i)] for i in range(3)]

    async def scene() -> None:
        first: dict[str, list[list[int]]] = {}
        for turn in range(20):
            target = ("llama", "qwen3")[turn % 2]
            await pair.activate(target)
            answers = await asyncio.gather(*(pair.generate(target, prompt, 12) for prompt in prompts))
            outputs = [output for output, _ in answers]
            assert outputs == first.setdefault(target, outputs)
            assert pair.active() == target
        assert first["llama"] != first["qwen3"]

    pair.run(scene())
    assert not pair.downs


def test_a_switch_empties_the_cache_and_the_mirror_knows(pair: Pair) -> None:
    prompt = list(range(10, 110))
    chain = PageChain(16, array("I", prompt).tobytes())

    async def scene() -> None:
        await pair.activate("qwen3")
        await pair.generate("qwen3", prompt, 4)
        await until(lambda: pair.group.cached_tokens("qwen3", chain) == 96)
        _, cached = await pair.generate("qwen3", prompt, 4)
        assert cached == 96
        await pair.activate("llama")
        assert pair.group.cached_tokens("qwen3", chain) == 0
        await pair.activate("qwen3")
        assert pair.group.cached_tokens("qwen3", chain) == 0
        _, cached = await pair.generate("qwen3", prompt, 4)
        assert cached == 0
        await until(lambda: pair.group.cached_tokens("qwen3", chain) == 96)

    pair.run(scene())


def test_a_busy_engine_is_not_parked_and_goes_on(pair: Pair) -> None:
    async def scene() -> None:
        await pair.activate("qwen3")
        prompt = list(range(20, 80))
        alone, _ = await pair.generate("qwen3", prompt, 300)
        call = asyncio.create_task(pair.generate("qwen3", prompt, 300))
        refused = 0
        while not call.done():
            try:
                await pair.engine("qwen3").park()
            except Busy:
                refused += 1
                assert pair.engine("qwen3").state is EngineState.ACTIVE
                await asyncio.sleep(0.05)
            else:  # it came before the call, or after it
                await pair.engine("qwen3").activate()
                await asyncio.sleep(0.01)
        assert (await call)[0] == alone
        assert refused > 0

    pair.run(scene())


def test_a_parked_engine_costs_little_cpu(pair: Pair) -> None:
    async def scene() -> float:
        await pair.activate("qwen3")
        pids = processes(pair.engine("llama"))
        assert len(pids) >= 3
        before_s, started_s = cpu_s(pids), time.monotonic()
        await asyncio.sleep(4)
        return (cpu_s(pids) - before_s) / (time.monotonic() - started_s)

    assert pair.run(scene()) < 0.25


@pytest.mark.parametrize("victim", ["scheduler", *(pytest.param(name, marks=pytest.mark.full) for name in ("detokenizer", "server"))])
def test_an_engine_whose_process_dies_is_reported_and_can_be_opened_again(pair: Pair, victim: str) -> None:
    engine = pair.engine("qwen3")

    async def scene() -> None:
        await pair.activate("qwen3")
        prompt = list(range(40, 100))
        before, _ = await pair.generate("qwen3", prompt, 8)
        pids = processes(engine)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        pid = engine.pid if victim == "server" else next(pid for pid, words in commands.items() if victim.encode() in words)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pair.downs == ["qwen3"])
        assert engine.state is EngineState.FAILED and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert pair.engine("llama").state is EngineState.PARKED
        await pair.group.reap("qwen3")
        assert (await pair.group.switch(None, "qwen3")).path == "open"
        assert (await pair.generate("qwen3", prompt, 8))[0] == before

    try:
        pair.run(scene())
    finally:
        pair.downs.clear()


def test_a_model_that_is_none_is_a_clear_error(cpu_engine: config.Engine, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    async def start(path: Path) -> str:
        holds = HoldServer(lambda model, message: None, lambda model: None)
        await holds.start(tmp_path / "holds")
        engine = Engine("big", config.Model(path=str(path)), config.Instance(name="g0", models=("big",)), cpu_engine, holds, print)
        try:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(EngineFailed) as failed:
                    await engine.start()
            assert engine.state is EngineState.FAILED and engine.pid is None
        finally:
            await engine.stop()
            await holds.stop()
        return str(failed.value)

    assert asyncio.run(start(tmp_path / "nowhere")) == f"engine of 'big' does not start: no model at {tmp_path / 'nowhere'}"
    said = asyncio.run(start(tmp_path / "model"))
    assert "Error" in said and str(tmp_path / "model") in said and "\n" not in said
