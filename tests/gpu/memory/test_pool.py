"""Ranks and the pool's server over a socket, with real bytes and without an engine: what is asked, answered, lost and left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.memory import client
from talaria.gpu.memory.checkpoints import Checkpoints
from talaria.gpu.memory.client import PoolClient
from talaria.gpu.memory.cpu import CpuMover
from talaria.gpu.memory.layout import Buffer, PageLayout
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol import memory as protocol
from tests.gpu.memory.leaks import descriptors, mappings
from tests.gpu.memory.ranks import PAGE_TOKENS, PATIENCE_S, SLAB_BYTES, Rank, RankProcess, chain, tokens_of


class Pool:
    def __init__(self, server: MemoryServer, path: Path) -> None:
        self.server, self.path = server, path
        self.lost: list[str] = []
        self._ranks: list[Rank] = []
        self._processes: list[RankProcess] = []

    async def process(self, *how: Any) -> RankProcess:
        process = await asyncio.to_thread(RankProcess, self.path, *how)
        self._processes.append(process)
        return process

    async def rank(self, **how: Any) -> Rank:
        rank = await asyncio.to_thread(Rank, self.path, **how)
        self._ranks.append(rank)
        return rank

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for process in self._processes:
            await asyncio.to_thread(process.kill)
        for rank in self._ranks:
            await asyncio.to_thread(rank.close)


@asynccontextmanager
async def pool(tmp_path: Path, *, slabs: int = 32, ranks: int = 1) -> AsyncIterator[Pool]:
    """Leaves no descriptor and no mapping behind."""
    before = descriptors(), mappings()
    server = MemoryServer(slabs * SLAB_BYTES * ranks, ranks, SLAB_BYTES, lost=lambda model: made.lost.append(model))
    await server.start(tmp_path / "pool")
    made = Pool(server, tmp_path / "pool")
    try:
        yield made
        assert server.store.audit() == []
    finally:
        await made.close()
        await server.stop()
    await made.until(lambda: descriptors() <= before[0] and mappings() <= before[1])


def test_what_is_offered_comes_back_after_a_flush(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(3))
            for page in range(3):
                rank.fill(page + 5, page + 1)
            rank.offer(digests, [5, 6, 7])
            await asyncio.to_thread(rank.flush)
            for page in range(16):
                rank.fill(page, 255)
            assert await asyncio.to_thread(rank.restore, "request", digests, [2, 9, 0])
            assert [rank.values(page) for page in (2, 9, 0)] == [{1}, {2}, {3}]
            assert rank.checkpoints.completed() == 0
            tokens = array("I", tokens_of(4)).tobytes()
            assert host.server.cached_tokens("m", PageChain(PAGE_TOKENS, tokens), 0) == 12
            assert host.server.cached_tokens("m", PageChain(PAGE_TOKENS, tokens[: 12 * 4]), 0) == 8, "a last token is always computed"
            assert host.server.cached_tokens("other", PageChain(PAGE_TOKENS, tokens), 4) == 4
            await host.until(lambda: not host.server.store.registry.held_bytes)

    asyncio.run(main())


def test_offers_end_in_their_order_and_only_when_copied(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            rank.saving.opened.clear()
            rank.checkpoints.refuse()
            rank.offer(chain(*tokens_of(1)), [0])
            rank.offer(chain(*tokens_of(2)), [0, 1])
            await host.until(lambda: host.server.store.used_bytes)
            assert rank.checkpoints.completed() == 1
            assert not rank.checkpoints.pop()
            assert rank.checkpoints.completed() == 0
            assert await asyncio.to_thread(rank.restores.find, "early", chain(*tokens_of(1))) == 0
            rank.saving.opened.set()
            await host.until(lambda: rank.checkpoints.completed() == 2)
            assert rank.checkpoints.pop() and rank.checkpoints.pop()

    asyncio.run(main())


def test_an_offer_that_has_no_room_or_fails_is_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, slabs=4) as host:
            rank = await host.rank()
            rank.offer(chain(*tokens_of(5)), list(range(5)))
            await host.until(lambda: rank.checkpoints.completed())
            assert not rank.checkpoints.pop()
            rank.saving.fails = True
            rank.offer(chain(*tokens_of(1)), [0])
            await host.until(lambda: rank.checkpoints.completed())
            assert not rank.checkpoints.pop()
            rank.saving.fails = False
            await asyncio.to_thread(rank.flush)
            assert host.server.store.used_bytes == 0
            rank.offer(chain(*tokens_of(1)), [0])
            await host.until(lambda: rank.checkpoints.completed())
            assert rank.checkpoints.pop()

    asyncio.run(main())


def test_a_restore_that_fails_is_told_and_that_request_is_offered_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(2))
            rank.offer(digests, [0, 1])
            await asyncio.to_thread(rank.flush)
            rank.loading.fails = True
            assert not await asyncio.to_thread(rank.restore, "unlucky", digests, [4, 5])
            rank.loading.fails = False
            assert await asyncio.to_thread(rank.restores.find, "unlucky", digests) == 0
            assert await asyncio.to_thread(rank.restore, "next", digests, [4, 5])
            await host.until(lambda: not host.server.store.registry.held_bytes)

    asyncio.run(main())


def test_what_is_found_and_not_restored_is_let_go(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(2))
            rank.offer(digests, [0, 1])
            await asyncio.to_thread(rank.flush)
            for request in ("waits", "gone", "cancelled"):
                assert await asyncio.to_thread(rank.restores.find, request, digests) == 2
            rank.restores.queue("cancelled", [4, 5])
            assert rank.restores.cancel("cancelled") and not rank.restores.cancel("cancelled")
            rank.restores.keep(["waits"])
            assert rank.restores.start(()) == -1
            rank.restores.keep([])
            await host.until(lambda: not host.server.store.registry.held_bytes)
            rank.restores.queue("unknown", [4, 5])
            assert not await asyncio.to_thread(rank.restores.finish, rank.restores.start(())), "other ranks found it: it must fail here"

    asyncio.run(main())


def test_pages_of_another_revision_are_not_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(2))
            rank.offer(digests, [0, 1])
            await asyncio.to_thread(rank.flush)
            changed = await host.rank(revision="2")
            assert await asyncio.to_thread(changed.restores.find, "request", digests) == 0

    asyncio.run(main())


def test_a_rank_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            await host.rank()
            with pytest.raises(ValueError, match="taken"):
                await host.rank()
            with pytest.raises(ValueError, match="2 ranks, the pool has 1"):
                await host.rank(ranks=2, model="other")
            with pytest.raises(OSError):
                await asyncio.to_thread(Rank, host.path.with_name("nowhere"))

    asyncio.run(main())


def test_a_rank_that_dies_in_the_middle_takes_only_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, ranks=2) as host:
            dying = [await host.process(number, 2) for number in range(2)]
            other, peer = [await host.rank(rank=number, ranks=2, model="other") for number in range(2)]
            kept, begun = chain(*tokens_of(2)), chain(*tokens_of(4))
            for rank in (other, peer):
                rank.offer(kept, [0, 1])
                await asyncio.to_thread(rank.flush)
            for command in ("save", "read", "write"):
                for process in dying:
                    await asyncio.to_thread(process.tell, command)
            await host.until(lambda: host.server.store.used_bytes == 6 * 2 * SLAB_BYTES)
            for process in dying:
                await asyncio.to_thread(process.kill)
            await host.until(lambda: not host.server.store.registry.held_bytes)
            assert host.server.store.audit() == []
            assert host.server.store.used_bytes == 4 * 2 * SLAB_BYTES
            for rank in (other, peer):
                assert await asyncio.to_thread(rank.restore, "request", kept, [7, 8])
            again = [await host.rank(rank=number, ranks=2) for number in range(2)]
            for rank in again:
                assert await asyncio.to_thread(rank.restores.find, "request", begun) == 2

    asyncio.run(main())


def test_what_a_rank_that_is_cut_off_still_reads_and_writes_is_nobody_elses(tmp_path: Path) -> None:
    """It says something that is no message, its connection is closed, and its copies go on."""

    async def main() -> None:
        async with pool(tmp_path, slabs=12) as host:
            store, process, other = host.server.store, await host.process(), await host.rank(model="other")
            for command in ("save", "read", "write"):
                await asyncio.to_thread(process.tell, command)
            await host.until(lambda: store.used_bytes == 4 * SLAB_BYTES)
            await asyncio.to_thread(process.tell, "talk_nonsense")
            await host.until(lambda: host.lost == ["m"])
            prompts = [chain(*tokens_of(1, 1000 * number)) for number in range(1, 16)]
            for number, prompt in enumerate(prompts):
                other.fill(0, 100 + number)
                other.offer(prompt, [0])
                await asyncio.to_thread(other.flush)
            await asyncio.to_thread(process.tell, "go_on")
            there = [number for number, prompt in enumerate(prompts) if await asyncio.to_thread(other.restores.find, str(number), prompt)]
            assert len(there) == 8, "four slabs are not to be had"
            for number in there:
                assert await asyncio.to_thread(other.restore, str(number), prompts[number], [1])
                assert other.values(1) == {100 + number}
            assert store.registry.held_bytes and store.pool.free == 0
            await asyncio.to_thread(process.kill)
            await host.until(lambda: not store.registry.held_bytes)
            assert store.pool.free == 2
            again = await host.rank()
            assert await asyncio.to_thread(again.restore, "request", chain(*tokens_of(2)), [3, 4])
            assert [again.values(page) for page in (3, 4)] == [{1}, {2}]

    asyncio.run(main())


def test_a_flush_ends_with_an_error_where_copies_hang(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(2))
            rank.offer(digests, [0, 1])
            await asyncio.to_thread(rank.flush)
            rank.loading.opened.clear()
            await asyncio.to_thread(rank.begin, "request", digests, [4, 5])
            with pytest.raises(TimeoutError, match="from the host"):
                await asyncio.to_thread(rank.flush, 0.0)
            rank.saving.opened.clear()
            rank.offer(chain(*tokens_of(4)), [0, 1, 2, 3])
            with pytest.raises(TimeoutError, match="1 copies of KV to the host"):
                await asyncio.to_thread(rank.flush, 0.0)
            for stream in (rank.loading, rank.saving):
                stream.opened.set()
            await asyncio.to_thread(rank.flush)
            assert await asyncio.to_thread(rank.restore, "request", chain(*tokens_of(4)), [4, 5, 6, 7])

    asyncio.run(main())


def test_whatever_goes_wrong_with_one_checkpoint_the_next_ones_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            copy = rank.saving.copy

            def broken(*_: Any) -> Any:
                raise LookupError("a bug")

            rank.saving.copy = broken  # type: ignore[method-assign]
            rank.offer(chain(*tokens_of(1)), [0])
            await host.until(lambda: rank.checkpoints.completed())
            assert not rank.checkpoints.pop()
            rank.saving.copy = copy  # type: ignore[method-assign]
            rank.offer(chain(*tokens_of(1, 100)), [0])
            await host.until(lambda: rank.checkpoints.completed())
            assert rank.checkpoints.pop()
            assert host.server.store.failed_copies == 1

    asyncio.run(main())


def test_an_agent_that_does_not_answer_is_given_up_and_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    granted: list[tuple[int, bool, str]] = []
    with socket.socket(socket.AF_UNIX) as listening, open(os.memfd_create("talaria-test")) as file:
        listening.bind(str(tmp_path / "pool"))
        listening.listen()
        listening.settimeout(PATIENCE_S)

        def agent() -> bytes:
            """Welcomes, and is silent from then on."""
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                socket.send_fds(connection, [b"\0"], [file.fileno()])
                connection.sendall(protocol.frame(protocol.Welcome(SLAB_BYTES, 1)))
                heard = b""
                while more := connection.recv(65536):
                    heard += more
                return heard

        with ThreadPoolExecutor() as threads:
            heard = threads.submit(agent)
            join = protocol.Join(0, 1, "m", "1", "float32", PAGE_TOKENS, 1, 1, "mha", 0)
            told = threading.Event()

            def answered(number: int, pages: array[int], slabs: array[int], kept: bool) -> None:
                granted.append((number, kept, threading.current_thread().name))
                told.set()

            rank = PoolClient(str(tmp_path / "pool"), join, answered)
            monkeypatch.setattr(client, "_ANSWER_S", 0.05)
            rank.save(1, chain(*tokens_of(1)))
            assert rank.find("request", chain(*tokens_of(1))) == (0, array("I"))
            assert told.wait(PATIENCE_S) and heard.result(PATIENCE_S)
            rank.close()
    assert granted == [(1, False, "talaria-pool")]


def test_a_pool_whose_agent_hangs_up_at_once_is_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor() as threads:
        listening.bind(str(tmp_path / "pool"))
        listening.listen()
        listening.settimeout(PATIENCE_S)
        ended = threads.submit(lambda: listening.accept()[0].close())
        with pytest.raises(OSError, match="gone"):
            PoolClient(str(tmp_path / "pool"), protocol.Join(0, 1, "m", "1", "float32", PAGE_TOKENS, 1, 1, "mha", 0), lambda *_: None)
        ended.result(PATIENCE_S)


@pytest.mark.parametrize("greets", [False, True], ids=["accepts alone", "greets"])
def test_an_agent_that_does_not_answer_a_new_rank_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greets: bool) -> None:
    monkeypatch.setattr(client, "_ANSWER_S", 0.05)
    before = descriptors()
    with socket.socket(socket.AF_UNIX) as listening, open(os.memfd_create("talaria-test")) as file, ThreadPoolExecutor() as threads:
        listening.bind(str(tmp_path / "pool"))
        listening.listen()
        listening.settimeout(PATIENCE_S)

        def agent() -> None:
            """Silent until the rank has hung up."""
            connection, _ = listening.accept()
            with connection, suppress(ConnectionError):  # late, on a busy machine
                connection.settimeout(PATIENCE_S)
                if greets:
                    socket.send_fds(connection, [b"\0"], [file.fileno()])
                while connection.recv(65536):
                    pass

        silent = threads.submit(agent)
        with pytest.raises(OSError, match=r"^the agent that keeps the host pool does not answer$"):
            PoolClient(str(tmp_path / "pool"), protocol.Join(0, 1, "m", "1", "float32", PAGE_TOKENS, 1, 1, "mha", 0), lambda *_: None)
        silent.result(PATIENCE_S)
    assert descriptors() <= before


def test_without_an_agent_nothing_is_kept_and_nothing_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(1))
            for connection in host.server._connections:
                connection.cancel()
            await asyncio.to_thread(rank.client._thread.join, PATIENCE_S)
            rank.offer(digests, [0])
            await host.until(lambda: rank.checkpoints.completed())
            assert not rank.checkpoints.pop()
            assert await asyncio.to_thread(rank.restores.find, "request", digests) == 0
            await asyncio.to_thread(rank.flush)

    asyncio.run(main())


def test_a_pool_that_stops_ends_its_connections_without_a_fault(tmp_path: Path) -> None:
    """Of a rank that is there, of one that leaves while its process lives on, and of one that has said nothing yet."""

    async def main() -> None:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        server = MemoryServer(32 * SLAB_BYTES, 1, SLAB_BYTES, lost=lambda model: host.lost.append(model))
        await server.start(tmp_path / "pool")
        host = Pool(server, tmp_path / "pool")
        try:
            leaving, staying = await host.process(), await host.rank(model="other")
            await asyncio.to_thread(leaving.tell, "talk_nonsense")
            reader, writer = await asyncio.open_unix_connection(str(host.path))
            await host.until(lambda: host.lost == ["m"] and len(server._connections) == 3)
            await server.stop()
            await asyncio.to_thread(staying.client._thread.join, PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b"\0", "and the end"
            writer.close()
            await writer.wait_closed()
            assert faults == [] and not server._connections
        finally:
            await host.close()

    asyncio.run(main())


def test_what_is_no_message_ends_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            for data in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", protocol.frame(protocol.Done("request")), b"\0\0"):
                reader, writer = await asyncio.open_unix_connection(str(host.path))
                assert await reader.readexactly(1) == b"\0"
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()

    asyncio.run(main())


def test_granted_pages_beyond_what_was_offered_fail_that_offer_alone() -> None:
    told: list[tuple[int, bool]] = []
    layout = PageLayout([Buffer(0, 0, 8)], 8)
    checkpoints = Checkpoints(layout, CpuMover().stream(), lambda number, complete: told.append((number, complete)))
    checkpoints.offer([0], (), lambda number: checkpoints.granted(number, array("I", [7]), array("I", [0]), True))
    checkpoints.drain(time.monotonic() + PATIENCE_S)
    checkpoints.close()
    assert told == [(1, False)]
