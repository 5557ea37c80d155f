"""The agent's books of arenas and their sockets: whose they are, what they hold, and what survives whose end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from talaria.gpu.memory.arenas import Arenas
from talaria.gpu.memory.gather import Ledger
from talaria.gpu.protocol import arena as protocol
from tests.gpu.memory.leaks import descriptors
from tests.gpu.memory.tenants import CHUNK, Rank, TenantProcess

PATIENCE_S = 60.0


class World:
    def __init__(self, ranks: int, chunks: int) -> None:
        self.arenas = Arenas(ranks, chunks, CHUNK, check=True, lost=lambda model: self.lost.append(model))
        self.lost: list[str] = []
        self.living: list[Rank] = []
        self.processes: list[TenantProcess] = []

    async def rank(self, model: str, number: int = 0) -> Rank:
        assert self.arenas.path is not None
        rank = await asyncio.to_thread(Rank, self.arenas.path, model, number, len(self.arenas.arenas))
        self.living.append(rank)
        return rank

    async def process(self, model: str, *commands: str) -> TenantProcess:
        """It has done what it was told."""
        assert self.arenas.path is not None
        process = await asyncio.to_thread(TenantProcess, self.arenas.path, 0, len(self.arenas.arenas), model)
        self.processes.append(process)
        for command in commands:
            await asyncio.to_thread(process.tell, command)
        return process

    async def end(self, rank: Rank) -> None:
        self.living.remove(rank)
        await asyncio.to_thread(rank.end)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def run(directory: Path, scene: Callable[[World], Awaitable[None]], *, ranks: int = 1, chunks: int = 8) -> None:
    """Plays a scene, after which nothing is left open."""

    @asynccontextmanager
    async def world() -> AsyncIterator[World]:
        made = World(ranks, chunks)
        await made.arenas.start(directory / "arena")
        try:
            yield made
        finally:
            for process in made.processes:
                await asyncio.to_thread(process.kill)
            for rank in list(made.living):
                await made.end(rank)
            await made.arenas.stop()

    async def main() -> None:
        before = descriptors()
        async with asyncio.timeout(PATIENCE_S), world() as made:
            await scene(made)
        assert descriptors() == before

    asyncio.run(main())


def test_the_memory_that_the_first_engine_makes_is_everybodys_and_outlives_it(tmp_path: Path) -> None:
    chunks = 3 * protocol.MOST_DESCRIPTORS + 1

    async def scene(world: World) -> None:
        first = await world.rank("a")
        assert not first.tenant.welcome.made and first.tenant.welcome.check
        assert await asyncio.to_thread(first.show) == Ledger("", {}, 0)
        for place in range(chunks):
            first.write(place, place.to_bytes(4, "big"))
        first.park()
        await world.end(first)
        second = await world.rank("b")
        assert second.tenant.welcome.made
        await asyncio.to_thread(second.show)
        assert [int.from_bytes(second.read(place, 4), "big") for place in range(chunks)] == list(range(chunks))

    run(tmp_path, scene, chunks=chunks)


def test_an_arena_is_given_once_it_is_free_and_its_ledger_to_its_model_only(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        a, b = await world.rank("a"), await world.rank("b")
        await asyncio.to_thread(a.show)
        waiting = asyncio.create_task(asyncio.to_thread(b.show))
        await until(lambda: bool(world.arenas.arenas[0].waiting))
        assert world.arenas.owners() == ["a"] and not waiting.done()
        a.park(Ledger("b", {0: 5, 2: 7}, CHUNK))
        ledger = await waiting
        assert (ledger.staged, ledger.dirty_bytes) == ({0: 5, 2: 7}, CHUNK)
        b.park(Ledger("c", {0: 1}, 0))
        assert (await asyncio.to_thread(a.show)).staged == {}, "what was staged for another is of no use"
        a.park()
        assert (await asyncio.to_thread(b.show)).staged == {}, "a ledger is good once"

    run(tmp_path, scene)


@pytest.mark.parametrize("others", [0, 1])
def test_an_owner_that_dies_leaves_an_arena_of_unknown_content(tmp_path: Path, others: int) -> None:
    async def scene(world: World) -> None:
        a, b = await world.rank("a"), await world.process("b", "attach")
        await asyncio.to_thread(a.show)
        a.park(Ledger("b", {1: 4}, 0))
        await asyncio.to_thread(b.tell, "show")
        waiting = [asyncio.create_task(asyncio.to_thread(a.show)) for _ in range(others)]
        await until(lambda: len(world.arenas.arenas[0].waiting) == others)
        await asyncio.to_thread(b.kill)
        ledgers = [await task for task in waiting] or [await asyncio.to_thread(a.show)]
        assert ledgers[0].staged == {} and world.arenas.owners() == ["a"]

    run(tmp_path, scene)


@pytest.mark.parametrize("how", ["hang_up", "talk_nonsense"])
def test_an_owner_without_a_connection_has_its_arena_as_long_as_its_process_lives(tmp_path: Path, how: str) -> None:
    async def scene(world: World) -> None:
        owner, other = await world.process("a", "attach", "show"), await world.rank("b")
        waiting = asyncio.create_task(asyncio.to_thread(other.show))
        await until(lambda: bool(world.arenas.arenas[0].waiting))
        await asyncio.to_thread(owner.tell, how)
        await until(lambda: world.lost == ["a"])
        await asyncio.to_thread(owner.tell, "write")
        assert world.arenas.owners() == ["a"] and len(world.arenas.arenas[0].waiting) == 1
        await asyncio.to_thread(owner.kill)
        assert (await waiting).staged == {}
        assert world.arenas.owners() == ["b"] and other.read(0, 4) == b"mine"
        assert world.lost == ["a"]

    run(tmp_path, scene)


def test_who_has_parked_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        other = await world.rank("b")
        await world.process("a", "attach", "show", "park", "hang_up")
        await asyncio.to_thread(other.show)
        await until(lambda: world.lost == ["a"])
        assert world.arenas.owners() == ["b"]

    run(tmp_path, scene)


def test_whoever_dies_waiting_is_passed_over(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        a, b, c = [await world.rank(name) for name in "abc"]
        await asyncio.to_thread(a.show)
        lost = asyncio.create_task(asyncio.to_thread(b.tenant.take))
        await until(lambda: len(world.arenas.arenas[0].waiting) == 1)
        patient = asyncio.create_task(asyncio.to_thread(c.show))
        await until(lambda: len(world.arenas.arenas[0].waiting) == 2)
        await world.end(b)
        with pytest.raises(OSError, match="gone"):
            await lost
        await until(lambda: len(world.arenas.arenas[0].waiting) == 1)
        a.park()
        await patient
        assert world.arenas.owners() == ["c"]

    run(tmp_path, scene)


def test_who_dies_while_it_makes_the_arena_leaves_it_to_the_next(tmp_path: Path) -> None:
    """Not before: its device memory is still taken."""

    async def scene(world: World) -> None:
        maker = await world.process("a", "make_one")
        await until(lambda: world.arenas.arenas[0].maker is not None)
        with pytest.raises(ValueError, match="another engine is making"):
            await world.rank("b")
        await asyncio.to_thread(maker.tell, "make_no_more")
        await until(lambda: world.lost == ["a"])
        with pytest.raises(ValueError, match="another engine is making"):
            await world.rank("b")
        await asyncio.to_thread(maker.kill)
        await until(lambda: world.arenas.arenas[0].maker is None)
        assert not (await world.rank("b")).tenant.welcome.made

    run(tmp_path, scene)


def test_who_is_gone_before_it_is_heard_makes_no_arena(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        gone = await world.process("a")
        gone.tell("make_one")  # while the loop stands still
        gone.kill()
        await until(lambda: world.arenas.arenas[0].maker is None)
        assert not (await world.rank("b")).tenant.welcome.made

    run(tmp_path, scene)


def test_a_rank_that_is_gone_when_it_is_to_stage_is_lost_and_no_other(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        path = world.arenas.path
        assert path is not None
        living = await world.rank("a")
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(path))
            gone.sendall(protocol.frame(protocol.Attach(1, 0, 1, "a")))
            await until(lambda: [rank.model for rank in world.arenas.ranks] == ["a", "a"])
        world.arenas.stage("a", "", 0.0)
        assert len(world.arenas.ranks) == 1
        await until(lambda: len(living.stages) == 1)

    run(tmp_path, scene)


def test_images_outlive_their_engines_and_come_with_the_wish_to_stage_them(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        a, b = await world.rank("a"), await world.rank("b")
        world.arenas.stage("a", "b", 1e9)
        await until(lambda: len(a.stages) == 1)
        assert a.stages == [(protocol.Stage("", 0, 0.0), b"")], "what was never open cannot be staged"
        b.keep(b"weights of b")
        await until(lambda: world.arenas.image_bytes == 12)
        await world.end(b)
        world.arenas.stage("a", "b", 1e9)
        world.arenas.stage("a", "", 0.0)
        await until(lambda: len(a.stages) == 3)
        assert a.stages[1:] == [(protocol.Stage("b", 12, 1e9), b"weights of b"), (protocol.Stage("", 0, 0.0), b"")]
        again = await world.rank("b")
        assert again.tenant.image is not None and os.pread(again.tenant.image, 20, 0) == b"weights of b"
        again.keep(b"other weights")
        await until(lambda: world.arenas.image_bytes == 13)

    run(tmp_path, scene)


def test_a_switch_is_recorded_when_every_rank_has_told_of_it(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        ranks = [(await world.rank("a", number), await world.rank("b", number)) for number in (0, 1)]
        for a, b in ranks:
            await asyncio.to_thread(a.show)
            a.park()
            await asyncio.to_thread(b.show)
        ranks[0][1].tenant.tell(protocol.Timed((1.0, 2.0, 3.0, 4.0), "h2d", 0, 9, 0))
        record = asyncio.create_task(world.arenas.switched("b"))
        done, _ = await asyncio.wait({record}, timeout=0.05)
        assert not done
        ranks[1][1].tenant.tell(protocol.Timed((2.0, 2.0, 3.0, 4.0), "partial", 4, 5, 1))
        found = sorted(await record, key=lambda rank: rank.record.path)
        assert [(rank.record.path, rank.record.phases_s, rank.dirty_bytes) for rank in found] == [
            ("h2d", (0.25, 1.0, 2.0, 3.0, 4.0), 0), ("partial", (0.25, 2.0, 2.0, 3.0, 4.0), 1),
        ]  # fmt: skip
        ranks[1][1].park()
        await asyncio.to_thread(ranks[1][1].show)
        again = asyncio.create_task(world.arenas.switched("b"))
        done, _ = await asyncio.wait({again}, timeout=0.05)
        assert not done, "a record of an earlier switch is none of this one"
        again.cancel()

    run(tmp_path, scene, ranks=2)


def test_ranks_that_do_not_belong_here_are_refused(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        path = world.arenas.path
        assert path is not None
        for number, ranks in ((0, 2), (1, 1), (-1, 1)):
            with pytest.raises(ValueError, match="the instance has 1"):
                await asyncio.to_thread(Rank, path, "a", number, ranks)
        await world.rank("a")
        nonsense = [
            protocol.frame(protocol.Take(1)), b"\0\0\0\1\xff", b"\xff\xff\xff\xff",
            protocol.frame(protocol.Attach(1, 0, 1, "x")) + protocol.frame(protocol.Keep(5)),
            protocol.frame(protocol.Attach(1, 0, 1, "x")) + protocol.frame(protocol.Park("", {}, 0, 0.0)),
            protocol.frame(protocol.Attach(1, 0, 1, "x")) + protocol.frame(protocol.Chunks(9)),
        ]  # fmt: skip
        for data in nonsense:
            await asyncio.to_thread(is_closed_after, path, data)
        await until(lambda: len(world.arenas.ranks) == 1)
        await world.rank("b")

    run(tmp_path, scene)


def is_closed_after(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        connection.sendall(data)
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass
