"""A selection of the conformance suite on real engines, in real time: the phases that only a group of processes can get wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from talaria.gpu import config
from talaria.gpu.agent.host import Engines
from talaria.gpu.engine.engine import EngineState
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.engine.supervisor import Supervisor
from talaria.gpu.protocol.engine import CALL_HEADER, FromEngine
from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import Command, EngineView, Event
from talaria.policy.timing import Timing
from tests.conformance.scenes import PHASES, Scene, admitted
from tests.conformance.suite import HAPPENINGS, assert_rest
from tests.conformance.test_gpu import AgentWorld, _Client
from tests.conformance.world import Setup, Step

MODELS = ("qwen3", "llama")
REST_S = 0.3
"""Without a call, a switch or a timer for so long, nothing more will happen."""
PATIENCE_S = 120.0


class Group:
    """Two real engines, and the ears of whichever instance runs over them."""

    def __init__(self, cpu_engine: config.Engine, models: Path, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.say: Callable[[str, FromEngine], None] = lambda model, message: None
        self.died: Callable[[str, str], None] = lambda model, why: None
        self._directory = directory
        self._holds = HoldServer(lambda model, message: self.say(model, message), lambda model: None)
        served = {name: config.Model(path=str(models / name), kv_tokens=30_000) for name in MODELS}
        instance = config.Instance(name="g0", models=MODELS)
        self.engines = Supervisor(served, instance, cpu_engine, self._holds, lambda model, why: self.died(model, why))
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.http = aiohttp.ClientSession()
        await self._holds.start(self._directory / "hold")
        await self.engines.start()

    def close(self) -> None:
        async def stop() -> None:
            await self.engines.stop()
            await self._holds.stop()
            await self.http.close()

        self.loop.run_until_complete(stop())
        self.loop.close()

    async def fresh(self) -> None:
        """The first model active, nothing cached, as at the start."""
        self.say, self.died = lambda model, message: None, lambda model, why: None
        first, second = MODELS
        if self.engines.residency(second).value == "active":
            await self.engines.switch(second, first)
        elif self.engines.residency(first).value != "active":
            await self.engines.switch(None, first)
        await self.engines.flush(first)
        if self.engines.engines[second].state in (EngineState.FAILED, EngineState.ABSENT):
            await self.engines.switch(first, second)
            await self.engines.switch(second, first)


class _Poster(_Client):
    """Posts token ids to the engine itself; its whole answer is of no interest, only that it comes."""

    def post(self, model: str) -> None:
        self.task = asyncio.get_running_loop().create_task(self._post(model))

    async def _post(self, model: str) -> None:
        body = {
            "model": model, "prompt": array("I", self._prompt).tolist(), "max_tokens": self._output_tokens, "ignore_eos": True,
            "temperature": 0.0,
        }  # fmt: skip
        url, headers = self._world.engines.url(model), {CALL_HEADER: self._world.instance.runs[self._call.id].engine_id}
        try:
            async with self._world.group.http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
        except aiohttp.ClientError:
            pass  # its engine has died: the instance posts again


class EnginesWorld(AgentWorld):
    names = MODELS

    def __init__(self, setup: Setup, group: Group) -> None:
        self.group = group
        self._until: Callable[[], bool] = lambda: False
        self._reached = False
        self._runs: dict[LineKey, Any] = {}
        super().__init__(setup)
        group.say, group.died = self.instance.heard, self.instance.group.died

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return self.group.loop

    async def _new_engines(self, timing: dict[str, Timing], opened: tuple[str, ...]) -> Engines:
        await self.group.fresh()
        return self.group.engines

    def __del__(self) -> None:
        """The loop is the group's."""

    def tokens_of(self, key: LineKey) -> bytes:
        run = self._runs.get(key)
        return b"" if run is None else run.prompt + bytes(run.output)

    def submit_prompt(self, call: Call, prompt: bytes, output_tokens: int) -> None:
        self._submitted += 1
        client = self.clients[call.id] = _Poster(self, call, prompt, output_tokens)
        run = self._runs[call.key] = self.loop.run_until_complete(self._submit(call, client))
        assert self.advance(lambda: run.arrived or run.over, PATIENCE_S)

    def new_tokens(self, count: int) -> bytes:
        self._fresh += count
        return array("I", [10 + (self._fresh * 7 + at * at) % 400 for at in range(count)]).tobytes()

    def crash(self, rank: int) -> None:
        if self.instance.healthy():
            self._mended.clear()
            active = self.instance.view.active
            assert active is not None
            os.kill(self.engines.engines[active].pid, signal.SIGKILL)
            assert self.advance(lambda: not self.instance.healthy(), PATIENCE_S)

    def recover(self) -> None:
        if not self._mended.is_set():
            self.do(self._mended.set)
            assert self.advance(self.instance.healthy, PATIENCE_S)

    def stepped(self, event: Event, view: EngineView, now_s: float, commands: list[Command]) -> None:
        super().stepped(event, view, now_s, commands)
        self._reached = self._reached or self._until()

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Asked at every step, and in between."""

        async def wait() -> bool:
            deadline_s = self.now_s() + min(limit_s, PATIENCE_S)
            while not (self._reached or until()):
                if self.now_s() > deadline_s:
                    return False
                await asyncio.sleep(0.005)
            return True

        self._until, self._reached = until, until()
        try:
            return bool(self.loop.run_until_complete(wait()))
        finally:
            self._until, self._reached = lambda: False, False

    def settle(self) -> None:
        since_s = [self.now_s()]

        def resting() -> bool:
            if not self.instance.idle or self.instance.alarm.is_set:
                since_s[0] = self.now_s()
            return self.now_s() - since_s[0] > REST_S

        assert self.advance(resting, PATIENCE_S), f"no rest in sight: {[(s.event, s.commands) for s in self.steps[-5:]]}"

    def audit(self) -> list[str]:
        return [] if self.instance.idle else ["the agent is not idle"]


class RealScene(Scene):
    def running(self, call: Call) -> Callable[[Step], bool]:
        """By what the scheduler was shown: time does not stand still between two looks, so its first token may be long past."""

        def runs(step: Step) -> bool:
            item = step.view.models[call.key.model].running.get(call.id)
            return item is not None and item.generated_tokens > 0

        return runs


@pytest.fixture(scope="module")
def group(cpu_engine: config.Engine, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    built = Group(cpu_engine, tiny_models, tmp_path_factory.mktemp("group"))
    try:
        yield built
    finally:
        built.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "happening"),
    [
        ("rest", "a new session arrives"),
        ("P", "the oldest call is cancelled"),
        ("D1", "the newest call is cancelled"),
        ("D1", "the engine dies"),
        ("switching", "a switch ends"),
        ("SP", "the oldest call is cancelled"),
        ("linger", "a lease ends"),
        ("recompute", "the newest call is cancelled"),
        ("recompute", "a tick"),
    ],
)
def test_an_event_in_a_phase_of_real_engines_ends_every_call_once(group: Group, phase: str, happening: str) -> None:
    setup = PHASES[phase].setup
    if phase == "recompute":  # only protected steps: in the rest of its slot a fast engine would answer the call to its end
        setup = replace(setup, knobs=replace(setup.knobs, linger_s=0.0))
    scene = RealScene(EnginesWorld(setup, group))
    PHASES[phase].enter(scene)
    HAPPENINGS[happening][1](scene)
    scene.world.recover()
    scene.world.settle()
    assert_rest(scene)


@pytest.mark.full
def test_real_engines_are_admitted_again_after_a_refusal(group: Group) -> None:
    scene = RealScene(EnginesWorld(Setup(), group))
    scene.world.refuse_next("no free KV")
    scene.first("a")
    scene.world.settle()
    assert sum(admitted("P")(step) for step in scene.world.steps) >= 2
    assert_rest(scene)
