"""The engines of a group, with stub servers that die of the same wrong requests as SGLang: order, switches, failures, back-off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from talaria.gpu import config
from talaria.gpu.engine.backoff import BackoffPolicy
from talaria.gpu.engine.engine import EngineState
from talaria.gpu.engine.errors import EngineFailed, SwitchFailed
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.engine.supervisor import Supervisor
from talaria.policy.snapshot import Residency

STUB = Path(__file__).parent / "stub" / "python"
NAMES = ("big", "other", "third")


class Group:
    """A supervisor over stub engines, and what it was told."""

    def __init__(self, directory: Path, policy: BackoffPolicy, **instance: int) -> None:
        self.downs: list[tuple[str, str]] = []
        self.models = {name: config.Model(path=str(directory / name), kv_tokens=10_000) for name in NAMES}
        for name in NAMES:
            (directory / name).mkdir()
            (directory / name / "config.json").write_text("{}")
        settings = config.Engine(
            python=str(STUB), environment={"STUB_PYTHON": sys.executable, "STUB_STEP_S": "0.005"}, page_tokens=16, start_timeout_s=60.0,
            log_dir=str(directory / "logs"),
        )  # fmt: skip
        self.holds = HoldServer(lambda model, message: None, lambda model: None)
        self.engines = Supervisor(
            self.models, config.Instance(name="g0", models=NAMES, **instance), settings, self.holds,
            lambda model, why: self.downs.append((model, why)), policy,
        )  # fmt: skip

    def states(self) -> list[EngineState]:
        return [engine.state for engine in self.engines.engines.values()]

    async def post(self, model: str, path: str, body: dict[str, object]) -> int:
        async with aiohttp.ClientSession() as session, session.post(self.engines.url(model) + path, json=body) as answer:
            await answer.read()
            return answer.status

    async def generate(self, model: str, tokens: int = 3) -> int:
        return await self.post(model, "/v1/completions", {"model": model, "prompt": "x " * 40, "max_tokens": tokens, "ignore_eos": True})


def run(directory: Path, scene: Callable[[Group], Awaitable[None]], policy: BackoffPolicy | None = None, **instance: int) -> None:
    @asynccontextmanager
    async def group() -> AsyncIterator[Group]:
        made = Group(directory, policy or BackoffPolicy(first_s=0.05), **instance)
        await made.holds.start(directory / "holds")
        try:
            yield made
        finally:
            await made.engines.stop()
            await made.holds.stop()

    async def main() -> None:
        async with group() as made, asyncio.timeout(240):
            await scene(made)
        assert not [engine.pid for engine in made.engines.engines.values() if engine.pid]

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_the_first_model_is_active_and_the_others_are_parked(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        assert group.states() == [EngineState.ACTIVE, EngineState.PARKED, EngineState.PARKED]
        assert [group.engines.residency(name) for name in NAMES] == [Residency.ACTIVE, Residency.PARKED, Residency.PARKED]
        assert group.engines.limits("other").kv_tokens == 10_000
        assert await group.generate("big") == 200

    run(tmp_path, scene)


def test_no_more_engines_than_may_be_resident(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        assert group.states() == [EngineState.ACTIVE, EngineState.ABSENT, EngineState.ABSENT]
        await group.engines.close("big")
        times = await group.engines.switch(None, "third")
        assert times.path == "open" and times.phases_s[1] > 0
        assert group.states() == [EngineState.ABSENT, EngineState.ABSENT, EngineState.ACTIVE]
        assert not group.downs, "what we stop has not gone down"

    run(tmp_path, scene, max_resident_models=1)


def test_switches_there_and_back_leave_one_active(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        source = "big"
        for target in ("other", "third", "big", "other", "big"):
            times = await group.engines.switch(source, target)
            assert times.path == "h2d" and all(phase_s > 0 for phase_s in times.phases_s)
            assert [name for name in NAMES if group.engines.residency(name) is Residency.ACTIVE] == [target]
            assert await group.generate(target) == 200
            source = target

    run(tmp_path, scene)


def test_a_switch_waits_for_the_last_call_and_loses_nothing(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        call = asyncio.create_task(group.generate("big", tokens=100))
        await asyncio.sleep(0.1)  # so that it is usually inside; the property holds either way
        await group.engines.switch("big", "other")
        assert await call == 200

    run(tmp_path, scene)


def test_a_flush_empties_the_cache_and_the_mirror(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        await group.generate("big")
        mirror = group.engines.engines["big"].mirror
        await until(lambda: len(mirror) > 0)
        await group.engines.flush("big")
        assert len(mirror) == 0 and group.states()[0] is EngineState.ACTIVE
        await group.generate("big")
        await until(lambda: len(mirror) > 0)

    run(tmp_path, scene)


def test_a_dead_engine_is_reported_absent_and_can_be_opened_again(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        for _ in range(3):
            pid = group.engines.engines["big"].pid
            assert pid is not None
            group.downs.clear()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: bool(group.downs))
            assert group.downs[0][0] == "big" and "137" in group.downs[0][1]
            assert group.engines.residency("big") is Residency.ABSENT and not group.engines.alive("big")
            await group.engines.reap("big")
            assert (await group.engines.switch(None, "big")).path == "open"
            assert await group.generate("big") == 200
        assert group.states() == [EngineState.ACTIVE, EngineState.PARKED, EngineState.PARKED]

    run(tmp_path, scene)


@pytest.mark.parametrize("victim", ["big", "other"])
def test_a_switch_during_which_an_engine_dies_fails_and_says_who_is_left(tmp_path: Path, victim: str) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        pid = group.engines.engines[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # before anybody has noticed
        with pytest.raises(SwitchFailed):
            await group.engines.switch("big", "other")
        await until(lambda: bool(group.downs))
        assert [name for name, _ in group.downs] == [victim]
        assert group.engines.residency(victim) is Residency.ABSENT
        survivor = "other" if victim == "big" else "big"
        assert group.engines.residency(survivor) is Residency.PARKED
        assert (await group.engines.switch(None, survivor)).path == "h2d"
        assert await group.generate(survivor) == 200

    run(tmp_path, scene)


def test_a_hung_engine_can_be_killed(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.start()
        await group.post("big", "/stub/hang", {})
        group.engines.kill("big", "it has said nothing for 3 s")
        await until(lambda: bool(group.downs))
        assert group.downs == [("big", "it has said nothing for 3 s")]

    run(tmp_path, scene)


def test_a_model_that_does_not_start_leaves_the_others_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(group: Group) -> None:
        shutil.rmtree(tmp_path / "other")
        await group.engines.start()
        assert group.states() == [EngineState.ACTIVE, EngineState.FAILED, EngineState.PARKED]
        assert group.engines.refusal("other") is None, "one failure may be bad luck"
        with pytest.raises(SwitchFailed, match=f"no model at {tmp_path / 'other'}"):
            await group.engines.switch("big", "other")
        assert group.states() == [EngineState.PARKED, EngineState.FAILED, EngineState.PARKED]
        assert "no model at" in (group.engines.refusal("other") or "")
        await group.engines.switch(None, "big")
        with pytest.raises(SwitchFailed, match="not started again yet"):
            await group.engines.switch("big", "other")
        assert group.states()[0] is EngineState.ACTIVE, "a start that is not due touches nothing"

    run(tmp_path, scene, BackoffPolicy(first_s=60.0))
    said = [record.getMessage() for record in caplog.records if "event=engine_failed" in record.getMessage()]
    assert len(said) == 2 and all("model=other" in line and "no model at" in line for line in said), "at the start, and on demand"


def test_no_engine_at_all_is_an_error(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        for name in NAMES:
            shutil.rmtree(tmp_path / name)
        with pytest.raises(EngineFailed, match="'big' does not start: no model at"):
            await group.engines.start()

    run(tmp_path, scene)


def test_a_start_can_be_given_up(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        engine = group.engines.engines["big"]
        start = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        await engine.stop()
        with pytest.raises(EngineFailed, match="stopped"):
            await start
        assert engine.state is EngineState.ABSENT

        start = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        assert engine.state is EngineState.ABSENT and engine.pid is None

    run(tmp_path, scene)


def test_no_key_is_on_the_command_line(tmp_path: Path) -> None:
    async def scene(group: Group) -> None:
        await group.engines.engines["big"].start()
        pid = group.engines.engines["big"].pid
        assert b"admin" not in Path(f"/proc/{pid}/cmdline").read_bytes()

    run(tmp_path, scene)
