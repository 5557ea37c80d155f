"""Ranks and the pool's server over a socket, with real bytes and without an engine: what is asked, answered, lost and left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.memory.checkpoints import Checkpoints
from talaria.gpu.memory.client import PoolClient
from talaria.gpu.memory.cpu import CpuMover, CpuStream, unmap
from talaria.gpu.memory.layout import Buffer, PageLayout
from talaria.gpu.memory.mover import Copies
from talaria.gpu.memory.restores import Restores
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol import memory as protocol
from talaria.substrate.prefix import page_hashes

SLAB_BYTES = 4096
PAGE_TOKENS = 4
ROW_BYTES = 1600
"""Of a page in each of the two layers: three slabs a page would be two too many."""
PATIENCE_S = 60.0


class Gated(CpuStream):
    """Copies when it may, and fails when it must."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.fails = False
        super().__init__()

    def move(self, copies: Copies) -> None:
        assert self.opened.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("no device")
        super().move(copies)


class Rank:
    """A rank of an engine, as the linker puts it together."""

    def __init__(self, path: Path, *, rank: int = 0, ranks: int = 1, model: str = "m", revision: str = "1") -> None:
        self.device = [ctypes.create_string_buffer(16 * ROW_BYTES) for _ in range(2)]
        buffers = [Buffer(layer, ctypes.addressof(memory), ROW_BYTES) for layer, memory in enumerate(self.device)]
        join = protocol.Join(os.getpid(), rank, ranks, model, revision, "float32", PAGE_TOKENS, 2 * ROW_BYTES, 2, "mha", 0)
        self.client = PoolClient(str(path), join, lambda *answer: self.checkpoints.granted(*answer))
        self.address = self.client.pool.map(rank * self.client.partition_bytes, self.client.partition_bytes)
        layout = PageLayout(buffers, self.client.slab_bytes, self.address)
        self.saving, self.loading = Gated(), Gated()
        self.checkpoints = Checkpoints(layout, self.saving, lambda number, complete: self.client.saved(number, complete=complete))
        self.restores = Restores(layout, self.loading, self.client)

    def fill(self, page: int, value: int) -> None:
        for memory in self.device:
            ctypes.memset(ctypes.addressof(memory) + page * ROW_BYTES, value, ROW_BYTES)

    def values(self, page: int) -> set[int]:
        return {value for memory in self.device for value in memory.raw[page * ROW_BYTES : (page + 1) * ROW_BYTES]}

    def offer(self, digests: list[str], pages: list[int]) -> None:
        self.checkpoints.offer(pages, (), lambda number: self.client.save(number, digests))

    def flush(self) -> None:
        self.checkpoints.drain()
        self.restores.drain()
        self.client.drain()

    def restore(self, request: str, digests: list[str], pages: list[int]) -> bool:
        assert self.restores.find(request, digests) == len(pages)
        self.restores.queue(request, pages)
        batch = self.restores.start(())
        self.restores.layers.set_consumer(batch)
        for layer in range(2):
            self.restores.layers.wait_until(layer)
        return self.restores.finish(batch)

    def die(self) -> None:
        self.client._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.saving.opened.set()
        self.loading.opened.set()
        self.checkpoints.close()
        self.restores.close()
        self.client.close()
        unmap(self.address, self.client.partition_bytes)


class Pool:
    def __init__(self, server: MemoryServer, path: Path) -> None:
        self.server, self.path = server, path
        self._ranks: list[Rank] = []

    async def rank(self, **how: Any) -> Rank:
        rank = await asyncio.to_thread(Rank, self.path, **how)
        self._ranks.append(rank)
        return rank

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        for rank in self._ranks:
            await asyncio.to_thread(rank.close)


@asynccontextmanager
async def pool(tmp_path: Path, *, slabs: int = 32, ranks: int = 1) -> AsyncIterator[Pool]:
    """Leaves no descriptor and no mapping behind."""
    before = descriptors(), mappings()
    server = MemoryServer(slabs * SLAB_BYTES * ranks, ranks, SLAB_BYTES)
    await server.start(tmp_path / "pool")
    made = Pool(server, tmp_path / "pool")
    try:
        yield made
        assert server.store.audit() == []
    finally:
        await made.close()
        await server.stop()
    await made.until(lambda: descriptors() <= before[0] and mappings() <= before[1])


def descriptors() -> set[str]:
    """What this process has open, apart from files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith(("socket:", "/memfd:talaria"))}


def mappings() -> int:
    return sum("/memfd:talaria-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def chain(*tokens: int) -> list[str]:
    return [digest.hex() for digest in page_hashes(tokens, PAGE_TOKENS)]


def tokens_of(pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + pages * PAGE_TOKENS))


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
            first, second = [await host.rank(rank=number, ranks=2) for number in range(2)]
            other, peer = [await host.rank(rank=number, ranks=2, model="other") for number in range(2)]
            kept, begun = chain(*tokens_of(1)), chain(*tokens_of(3))
            for rank in (first, second, other, peer):
                rank.offer(kept, [0])
                await host.until(lambda rank=rank: rank.checkpoints.completed())
            assert await asyncio.to_thread(first.restores.find, "request", kept) == 1
            second.saving.opened.clear()
            for rank in (first, second):
                rank.offer(begun, [0, 1, 2])
            await host.until(lambda: first.checkpoints.completed() == 2)
            for rank in (first, second):
                rank.die()
            await host.until(lambda: not host.server.store.registry.held_bytes)
            assert host.server.store.audit() == []
            for rank in (other, peer):
                assert await asyncio.to_thread(rank.restore, "request", kept, [7])
            again = [await host.rank(rank=number, ranks=2) for number in range(2)]
            for rank in again:
                assert await asyncio.to_thread(rank.restores.find, "request", begun) == 1

    asyncio.run(main())


def test_without_an_agent_nothing_is_kept_and_nothing_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as host:
            rank = await host.rank()
            digests = chain(*tokens_of(1))
            for writer in host.server._connections.values():
                writer.close()
            await asyncio.to_thread(rank.client._thread.join, PATIENCE_S)
            rank.offer(digests, [0])
            await host.until(lambda: rank.checkpoints.completed())
            assert not rank.checkpoints.pop()
            assert await asyncio.to_thread(rank.restores.find, "request", digests) == 0
            await asyncio.to_thread(rank.flush)

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
    checkpoints.drain()
    checkpoints.close()
    assert told == [(1, False)]
