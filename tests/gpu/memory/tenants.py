"""A rank's part of an arena without the engine: in the test's own process, or as a process that does what its standard input says."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

from talaria.gpu.memory.arena import Arena
from talaria.gpu.memory.cpu import CpuMover, MemoryFile
from talaria.gpu.memory.gather import NOTHING, Ledger
from talaria.gpu.memory.tenant import Tenant
from talaria.gpu.protocol import arena as protocol
from tests.gpu.memory.ranks import RankProcess, obey

CHUNK = CpuMover.granule_bytes


class Rank:
    """One rank of an engine, as ``hooks.arena`` behaves, with no engine around it."""

    def __init__(self, path: Path, model: str, rank: int, ranks: int) -> None:
        self.stages: list[tuple[protocol.Stage, bytes]] = []
        self.tenant = Tenant(str(path), protocol.Attach(os.getpid(), rank, ranks, model), self._stage)
        welcome = self.tenant.welcome
        self.arena = Arena(CpuMover(), welcome.chunks, welcome.chunk_bytes, self.tenant.chunks)
        if not welcome.made:
            self.tenant.made(self.arena.export())
        self.window = self.arena.window()

    def _stage(self, message: protocol.Stage, descriptor: int | None) -> None:
        data = b""
        if descriptor is not None:
            data = os.pread(descriptor, message.nbytes, 0)
            os.close(descriptor)
        self.stages.append((message, data))

    def write(self, place: int, data: bytes) -> None:
        ctypes.memmove(self.window.address + place * CHUNK, data, len(data))

    def read(self, place: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.window.address + place * CHUNK, nbytes)

    def show(self) -> Ledger:
        ledger = self.tenant.take()
        self.arena.show(self.window, range(self.arena.count))
        return ledger

    def park(self, ledger: Ledger = NOTHING) -> None:
        self.arena.hide(self.window)
        self.tenant.park(ledger, 0.25)

    def keep(self, weights: bytes) -> None:
        memory = MemoryFile.make("image", len(weights))
        os.pwrite(memory.descriptor, weights, 0)
        self.tenant.keep(memory.descriptor, len(weights))
        memory.close()

    def end(self) -> None:
        """As the kernel does where a process dies."""
        self.tenant.close()
        self.arena.close()
        if self.tenant.image is not None:
            os.close(self.tenant.image)


class TenantProcess(RankProcess):
    module = __name__


class _Obedient:
    """Attached or not, as it is told."""

    def __init__(self, path: Path, rank: int, ranks: int, model: str) -> None:
        self._path, self._attach = path, protocol.Attach(os.getpid(), rank, ranks, model)
        self._half = socket.socket(socket.AF_UNIX)

    def attach(self) -> None:
        self._rank = Rank(self._path, self._attach.model, self._attach.rank, self._attach.ranks)

    def show(self) -> None:
        self._rank.show()

    def park(self) -> None:
        self._rank.park()

    def write(self) -> None:
        self._rank.write(0, b"mine")

    def hang_up(self) -> None:
        self._rank.tenant.close()

    def talk_nonsense(self) -> None:
        """The agent hangs up."""
        self._rank.tenant._socket.sendall(b"\xff\xff\xff\xff")
        for thread in threading.enumerate():
            if thread.name == "talaria-arena":
                thread.join()

    def make_one(self) -> None:
        """Of the arena's chunks, and no more."""
        self._half.connect(str(self._path))
        self._half.sendall(protocol.frame(self._attach))
        memory = MemoryFile.make("chunk", CHUNK)
        socket.send_fds(self._half, [protocol.frame(protocol.Chunks(1))], [memory.descriptor])
        memory.close()

    def make_no_more(self) -> None:
        self._half.close()


if __name__ == "__main__":
    obey(_Obedient)
