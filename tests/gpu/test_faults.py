"""What breaks under a served cluster: every call ends well or with a clear error, all accounts agree, nothing stays behind.

Each scene is played over stub engines, and in the full tier over real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from talaria.gpu.engine.command import free_port
from tests.gpu.callers import PATHS, Books, Caller, Ending, until
from tests.gpu.cluster import Cluster, stub_document, wait_for
from tests.gpu.worlds import EngineWorld, StubWorld, World

COLD = {"name": "g0", "models": ["m0", "m1"]}
SHORT = 8
"""Output tokens of a call that only has to succeed."""


@pytest.fixture(params=["stub", pytest.param("engines", marks=pytest.mark.full)])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "stub":
        return StubWorld()
    engine = request.getfixturevalue("cpu_engine").model_dump(mode="json", exclude_none=True)
    return EngineWorld(request.getfixturevalue("tiny_models"), engine)


class Stage:
    """A served cluster, its clients, and what they may do."""

    def __init__(self, world: World, cluster: Cluster, http: aiohttp.ClientSession) -> None:
        self.world, self.cluster, self.http = world, cluster, http
        self.caller = Caller(cluster, http)

    def begin(self, model: str, count: int, tokens: int, **more: Any) -> list[asyncio.Task[Ending]]:
        """``count`` calls to ``model``, over all endpoints in turn, each of a session of its own."""
        return [asyncio.create_task(self._call(model, number, tokens, **more)) for number in range(count)]

    async def _call(self, model: str, number: int, tokens: int, **more: Any) -> Ending:
        path, prompt = PATHS[number % len(PATHS)], f"{model} begins number {number}: " + 200 * "words "
        ending = await self.caller.ask(model, prompt, tokens, path=path, session=f"{model}-{number}", **more)
        assert self.world.right(path, model, prompt, tokens, ending.text, ending.outcome == "completed"), ending
        return ending

    async def all_complete(self, model: str, count: int = 4) -> None:
        endings = await asyncio.gather(*self.begin(model, count, SHORT))
        assert [ending.outcome for ending in endings] == ["completed"] * count, endings

    async def talking(self, count: int = 4) -> None:
        await until("streams talk", lambda: self.caller.talking >= count)

    async def idle(self) -> bool:
        """Whether no engine runs a call."""
        try:
            return all([await self.world.idle(engine, self.http) for engine in self.cluster.processes("engine")])
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def ready(self) -> bool:
        async with self.http.get(f"{self.cluster.url}/ready") as answered:
            return answered.status == 200

    async def up(self, instance: str) -> bool:
        lines = await self.metrics("talaria_instance_up{")
        return any(f'instance="{instance}"' in line and float(line.split()[-1]) == 1.0 for line in lines)

    async def down(self, instance: str) -> bool:
        return not await self.up(instance)

    async def metrics(self, beginning: str) -> list[str]:
        async with self.http.get(f"{self.cluster.url}/metrics") as answered:
            return [line for line in (await answered.text()).splitlines() if line.startswith(beginning)]

    def pids(self, kind: str | None = None) -> set[int]:
        return {process.pid for process in self.cluster.processes(kind)}


Scene = Callable[[Stage], Awaitable[None]]


def play(world: World, cluster: Cluster, scene: Scene, *, books: bool = True) -> None:
    """Run a scene, then compare what clients saw with the gateway's own books."""

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            stage, account = Stage(world, cluster, http), Books(cluster, http)
            if books:
                await account.open()
            await scene(stage)
            stage.caller.tally()
            if books:
                await account.agree(stage.caller.endings)
            await until("no engine runs a call any more", stage.idle, world.ready_s)

    asyncio.run(asyncio.wait_for(run(), world.ready_s))


def test_every_endpoint_answers_and_nothing_stays_behind(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await asyncio.gather(*stage.begin("m0", 8, 30), *stage.begin("m1", 8, 30), *stage.begin("m0", 4, SHORT, stream=False))
        assert stage.caller.tally() == {"completed": 20}

    with Cluster(tmp_path, world.document(tmp_path, [COLD]), world.ready_s) as cluster:
        play(world, cluster, scene)
        assert cluster.terminate() == 0
        assert not cluster.processes()


def test_an_engine_killed_in_the_middle_of_streams_is_started_again(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        calls = stage.begin("m0", 12, world.long_tokens)
        await stage.talking()
        victim = stage.cluster.engine("m0").pid
        os.kill(victim, signal.SIGKILL)
        endings = await asyncio.gather(*calls, *stage.begin("m1", 4, SHORT))
        assert [ending.outcome for ending in endings[12:]] == ["completed"] * 4, endings
        await stage.all_complete("m0")
        assert stage.cluster.engine("m0").pid != victim

    with Cluster(tmp_path, world.document(tmp_path, [COLD]), world.ready_s) as cluster:
        play(world, cluster, scene)


def test_a_hung_engine_is_killed_and_its_calls_end(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        calls = stage.begin("m0", 8, world.long_tokens)
        await stage.talking()
        victim = stage.cluster.engine("m0").pid
        await world.hang(stage.cluster, stage.http, "m0")
        await asyncio.gather(*calls)
        await stage.all_complete("m0")
        await stage.all_complete("m1")
        assert victim not in stage.pids()

    with Cluster(tmp_path, world.document(tmp_path, [COLD], engine={"hang_s": world.hang_s}), world.ready_s) as cluster:
        play(world, cluster, scene)


def test_an_agent_that_is_killed_comes_back_with_fresh_engines(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        calls = stage.begin("m0", 8, world.long_tokens)
        await stage.talking()
        old = stage.pids("agent") | stage.pids("engine")
        os.kill(stage.cluster.agent("g0").pid, signal.SIGKILL)
        await asyncio.gather(*calls)
        await until("the old engines are gone", lambda: not old & stage.pids())
        await until("the cluster is ready again", stage.ready, world.ready_s)
        await stage.all_complete("m0")
        await stage.all_complete("m1")
        assert len(stage.pids("engine")) == 2

    with Cluster(tmp_path, world.document(tmp_path, [COLD]), world.ready_s) as cluster:
        play(world, cluster, scene)


def test_an_instance_without_telemetry_drains_to_the_other(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        calls = stage.begin("m0", 8, world.long_tokens)
        await stage.talking()
        frozen = stage.cluster.agent("a").pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            unanswered, only_there = stage.begin("m0", 8, SHORT), stage.begin("m1", 4, SHORT)
            await until("the silence is noticed", lambda: stage.down("a"))
            assert {ending.outcome for ending in await asyncio.gather(*unanswered)} == {"completed"}
            (again,) = await stage.metrics("talaria_placements_retried_total")
            assert float(again.split()[-1]) >= 1.0
            await stage.all_complete("m0", 8)
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert {ending.outcome for ending in await asyncio.gather(*only_there)} == {"completed"}
        await asyncio.gather(*calls)
        await until("it is heard again", lambda: stage.up("a"))
        await stage.all_complete("m0", 8)

    instances = [{"name": "a", "models": ["m0", "m1"]}, {"name": "b", "models": ["m0"]}]
    with Cluster(tmp_path, world.document(tmp_path, instances), world.ready_s) as cluster:
        play(world, cluster, scene)


def test_a_gateway_that_is_started_again_takes_over_leases_and_sessions(world: World, tmp_path: Path) -> None:
    async def before(stage: Stage) -> None:
        await stage.all_complete("m0", 8)
        calls = stage.begin("m0", 4, 5 * world.long_tokens)
        await stage.talking(2)
        stage.cluster.kill_gateway()
        endings = await asyncio.gather(*calls)
        assert {ending.outcome for ending in endings} <= {"cut off"}, endings
        stage.caller.endings.clear()  # nobody could tell them better

    async def after(stage: Stage) -> None:
        await stage.all_complete("m0", 8)
        placed = await stage.metrics("talaria_placements_total{")
        assert any('instance="a"' in line and 'reason="lease"' in line for line in placed), placed

    port = free_port()
    remote = {"name": "a", "models": ["m0"], "port": port, "url": f"http://127.0.0.1:{port}", "key": {"value": "key-of-the-agent"}}
    document = world.document(tmp_path, [remote, {"name": "b", "models": ["m0"]}], policy={"knobs": {"tau": 60.0}})
    with Cluster(tmp_path, document, world.ready_s) as cluster:
        play(world, cluster, before, books=False)
        cluster.start()
        cluster.wait_ready()
        play(world, cluster, after, books=False)


def test_clients_that_leave_free_their_engine(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        leaving = {"tokens": 10 * world.long_tokens, "leave_after": 10}
        await asyncio.gather(*stage.begin("m0", 8, **leaving), *stage.begin("m1", 8, **leaving), *stage.begin("m1", 4, SHORT))
        assert stage.caller.tally() == {"left": 16, "completed": 4}
        await stage.all_complete("m0")

    with Cluster(tmp_path, world.document(tmp_path, [COLD]), world.ready_s) as cluster:
        play(world, cluster, scene)


def test_a_wrong_model_path_costs_only_that_model(world: World, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.all_complete("m0")
        endings = await asyncio.gather(*stage.begin("m1", 4, SHORT))
        assert {ending.outcome for ending in endings} <= {"refused", "broken off"}, endings
        assert all("m1" in ending.why for ending in endings), endings
        await stage.all_complete("m0")

    document = world.document(tmp_path, [COLD])
    document["models"]["m1"]["path"] = str(tmp_path / "not there")
    with Cluster(tmp_path, document, world.ready_s) as cluster:
        play(world, cluster, scene)


def test_two_cold_instances_and_a_hot_one_honour_leases_and_help_out(world: World, tmp_path: Path) -> None:
    async def round_of_calls(stage: Stage) -> None:
        await asyncio.gather(stage.all_complete("m0", 8), stage.all_complete("m1", 4))

    async def placed_on_hot(stage: Stage, reason: str) -> int:
        lines = await stage.metrics('talaria_placements_total{instance="hot"')
        return sum(int(float(line.split()[-1])) for line in lines if reason in line)

    async def scene(stage: Stage) -> None:
        placed = leased = lately = 0
        for _ in range(4):
            await round_of_calls(stage)
            now_placed, now_leased = await placed_on_hot(stage, ""), await placed_on_hot(stage, 'reason="lease"')
            assert now_leased - leased == lately, "where no switch takes its prefix every session returns by its lease"
            placed, leased, lately = now_placed, now_leased, now_placed - placed
        assert leased > 0
        calls = stage.begin("m0", 12, world.long_tokens)
        await stage.talking()
        os.kill(stage.cluster.engine("m0", "hot").pid, signal.SIGKILL)
        for _ in range(3):
            await round_of_calls(stage)
        await asyncio.gather(*calls)

    instances = [
        {"name": "a", "models": ["m0", "m1"]},
        {"name": "b", "models": ["m0", "m1"]},
        {"name": "hot", "pool": "hot", "models": ["m0"]},
    ]
    document = world.document(tmp_path, instances, policy={"knobs": {"tau": 60.0}})
    with Cluster(tmp_path, document, world.ready_s) as cluster:
        play(world, cluster, scene)


def test_a_call_that_the_engine_refuses_concerns_only_its_client(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.http.post(f"{stage.cluster.engine('m0').url}/stub/refuse-next", json={"status": 400}) as told:
            assert told.status == 200
        endings = await asyncio.gather(*stage.begin("m0", 4, SHORT))
        assert sorted(ending.outcome for ending in endings)[:3] == ["completed"] * 3
        assert sum(ending.outcome != "completed" for ending in endings) == 1

    stubs = StubWorld()
    with Cluster(tmp_path, stubs.document(tmp_path, [COLD])) as cluster:
        play(stubs, cluster, scene)


def test_a_cluster_does_not_outlive_whoever_started_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, stub_document(tmp_path)) as cluster:
        assert cluster.processes("engine")
        cluster.abandon()
        wait_for("everything has ended", lambda: not cluster.processes())
