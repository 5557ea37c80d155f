"""A rank of an engine without the engine: in the test's own process, or as a process that does what its standard input says."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from talaria.gpu.memory.checkpoints import Checkpoints
from talaria.gpu.memory.client import PoolClient
from talaria.gpu.memory.cpu import CpuStream, unmap
from talaria.gpu.memory.layout import Buffer, PageLayout
from talaria.gpu.memory.mover import Copies
from talaria.gpu.memory.restores import Restores
from talaria.gpu.protocol import memory as protocol
from talaria.substrate.prefix import page_hashes

SLAB_BYTES = 4096
PAGE_TOKENS = 4
ROW_BYTES = 1600
"""Of a page in each of the two layers: three slabs a page would be two too many."""
PATIENCE_S = 60.0
PAGES = 16


def chain(*tokens: int) -> list[str]:
    return [digest.hex() for digest in page_hashes(tokens, PAGE_TOKENS)]


def tokens_of(pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + pages * PAGE_TOKENS))


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

    def __init__(
        self, path: Path, *, rank: int = 0, ranks: int = 1, model: str = "m", revision: str = "1", family: str = "mha",
        checkpoint_pages: int = 0,
    ) -> None:  # fmt: skip
        self.device = [ctypes.create_string_buffer(PAGES * ROW_BYTES) for _ in range(2)]
        buffers = [Buffer(layer, ctypes.addressof(memory), ROW_BYTES) for layer, memory in enumerate(self.device)]
        join = protocol.Join(rank, ranks, model, revision, "float32", PAGE_TOKENS, 2 * ROW_BYTES, 2, family, checkpoint_pages)
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

    def flush(self, within_s: float = PATIENCE_S) -> None:
        """Raises TimeoutError."""
        until_s = time.monotonic() + within_s
        self.checkpoints.drain(until_s)
        self.restores.drain(until_s)
        self.client.drain()

    def begin(self, request: str, digests: list[str], pages: list[int]) -> int:
        assert self.restores.find(request, digests) == len(pages)
        self.restores.queue(request, pages)
        return self.restores.start(())

    def restore(self, request: str, digests: list[str], pages: list[int]) -> bool:
        batch = self.begin(request, digests, pages)
        self.restores.layers.set_consumer(batch)
        for layer in range(2):
            self.restores.layers.wait_until(layer)
        return self.restores.finish(batch)

    def close(self) -> None:
        self.saving.opened.set()
        self.loading.opened.set()
        self.flush()
        self.checkpoints.close()
        self.restores.close()
        self.client.close()
        unmap(self.address, self.client.partition_bytes)


class RankProcess:
    """A rank that can be killed, or go on while nobody listens to it any more."""

    module = __name__

    def __init__(self, path: Path, rank: int = 0, ranks: int = 1, model: str = "m") -> None:
        words = [sys.executable, "-m", self.module, str(path), str(rank), str(ranks), model]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hear()

    def tell(self, command: str) -> None:
        """Returns when it is done. Commands are the methods of the module's ``_Obedient``."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        self.hear()

    def hear(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)


class _Obedient:
    """Page n of its device is full of n + 1; it offers and restores the pages from 0 on, and copies nothing until it is told to."""

    def __init__(self, path: Path, rank: int, ranks: int, model: str) -> None:
        self._rank = Rank(path, rank=rank, ranks=ranks, model=model)
        for page in range(PAGES):
            self._rank.fill(page, page + 1)

    def save(self) -> None:
        """Two pages, to the end."""
        self._rank.offer(chain(*tokens_of(2)), [0, 1])
        self._rank.flush()

    def write(self) -> None:
        """Begin to save four pages, the first two again."""
        self._rank.saving.opened.clear()
        self._rank.offer(chain(*tokens_of(4)), [0, 1, 2, 3])

    def read(self) -> None:
        """Begin to restore two pages."""
        self._rank.loading.opened.clear()
        self._rank.begin("request", chain(*tokens_of(2)), [8, 9])

    def talk_nonsense(self) -> None:
        self._rank.client._socket.sendall(b"\xff\xff\xff\xff")
        self._rank.client._thread.join(PATIENCE_S)

    def go_on(self) -> None:
        """All that has begun, to its end; what was read is right."""
        for stream in (self._rank.saving, self._rank.loading):
            stream.opened.set()
            stream.close()
        assert [self._rank.values(page) for page in (8, 9)] == [{1}, {2}]


def obey(obedient: Callable[[Path, int, int, str], object]) -> None:
    """The process of a ``RankProcess``."""
    rank = obedient(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print("done", flush=True)
    for line in sys.stdin:
        getattr(rank, line.strip())()
        print("done", flush=True)


if __name__ == "__main__":
    obey(_Obedient)
