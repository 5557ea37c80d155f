"""Ranks with real bytes, without an engine and without a socket: a device of pages, over the rank's partition of a host pool."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from talaria.gpu.memory.cpu import CpuStream, unmap
from talaria.gpu.memory.layout import Buffer, PageLayout
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.memory.store import Grant, HostStore, Seat

SLAB = 64
SHAPES = {  # of each model: page bytes of the buffers of each layer
    "mha": [[24, 24], [24, 24]],
    "mla": [[100], [100], [100]],
    "recurrent": [[10, 300]],
}
SPACING_PAGES = 2
"""Of the positions at which the recurrent model's state is saved."""
DEVICE_PAGES = 64


def chain(*parts: str) -> list[bytes]:
    """Digests of a prompt, page by page."""
    digests, so_far = [], b""
    for part in parts:
        so_far = hashlib.sha256(so_far + part.encode()).digest()
        digests.append(so_far)
    return digests


def content(model: str, rank: int, digest: bytes, nbytes: int) -> bytes:
    """What a rank computes for a page."""
    seed = hashlib.sha256(f"{model}/{rank}/".encode() + digest).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


class Rank:
    """A rank's device pool, over its partition of the host pool at ``address``."""

    def __init__(self, store: HostStore, model: str, rank: int, address: int) -> None:
        self.model, self.rank = model, rank
        shape = SHAPES[model]
        self.device = [[ctypes.create_string_buffer(size * DEVICE_PAGES) for size in layer] for layer in shape]
        buffers = [
            Buffer(number, ctypes.addressof(memory), size)
            for number, (memories, sizes) in enumerate(zip(self.device, shape, strict=True))
            for memory, size in zip(memories, sizes, strict=True)
        ]
        self.layout = PageLayout(buffers, SLAB, address)
        self.seat: Seat = store.join(model, rank, self.layout.page_bytes, model, SPACING_PAGES if model == "recurrent" else 0)
        self.stream = CpuStream()
        self.number = 0

    def compute(self, page: int, digest: bytes) -> None:
        self._each(page, content(self.model, self.rank, digest, self.layout.page_bytes))

    def _each(self, page: int, data: bytes | None) -> bytes:
        """The bytes of a page over all layers, overwritten where there is ``data``."""
        found = b""
        for memories, sizes in zip(self.device, SHAPES[self.model], strict=True):
            for memory, size in zip(memories, sizes, strict=True):
                if data is not None:
                    ctypes.memmove(ctypes.addressof(memory) + page * size, data[len(found) : len(found) + size], size)
                found += memory.raw[page * size : (page + 1) * size]
        return found

    def page(self, page: int) -> bytes:
        return self._each(page, None)

    def offer(self, store: HostStore, digests: Sequence[bytes], now_s: float) -> tuple[int, Grant]:
        self.number += 1
        return self.number, store.save(self.seat, self.number, digests, now_s)

    def write(self, digests: Sequence[bytes], grant: Grant) -> None:
        for page in grant.pages:
            self.compute(page, digests[page])
        if grant.pages:
            self.stream.copy(self.layout.to_pool(grant.pages, grant.slabs)).wait()

    def save(self, store: HostStore, digests: Sequence[bytes], now_s: float = 0.0) -> bool:
        number, grant = self.offer(store, digests, now_s)
        self.write(digests, grant)
        store.saved(self.seat, number, complete=True)
        return grant.kept

    def restore(self, store: HostStore, digests: Sequence[bytes], from_page: int = 0) -> int:
        """Copies what can be restored into freshly poisoned pages and checks every byte; where it ends."""
        pages, slabs = store.find(self.seat, "request", digests[from_page:])
        if pages:
            store.pin(self.seat, "request", pages)
            targets = list(range(pages))
            for page in targets:
                self._each(page, b"\xff" * self.layout.page_bytes)
            for layer in range(self.layout.layers):
                self.stream.copy(self.layout.to_device(targets, slabs, layer)).wait()
            for page in targets:
                expected = content(self.model, self.rank, digests[from_page + page], self.layout.page_bytes)
                assert self.page(page) == expected
        store.done(self.seat, "request")
        return from_page + pages if pages else 0


@dataclass
class Host:
    server: MemoryServer
    address: int
    """Of its pool in this process."""
    ranks: list[Rank] = field(default_factory=list)

    @property
    def store(self) -> HostStore:
        return self.server.store

    def engine(self, model: str) -> list[Rank]:
        partition = self.store.pool.total * SLAB
        ranks = [Rank(self.store, model, rank, self.address + rank * partition) for rank in range(self.store.ranks)]
        self.ranks += ranks
        return ranks


@contextmanager
def host_of(slabs: int, ranks: int) -> Iterator[Host]:
    """Its books balance at the end."""
    server, nbytes = MemoryServer(slabs * SLAB * ranks, ranks, SLAB), slabs * SLAB * ranks
    host = Host(server, server._pool.map(0, nbytes))
    try:
        yield host
        assert host.store.audit() == []
    finally:
        for rank in host.ranks:
            rank.stream.close()
        unmap(host.address, nbytes)
        asyncio.run(server.stop())
