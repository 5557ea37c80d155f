"""The mover without a device: memory files stand for device memory, threads for streams."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any, Final

from talaria.gpu.memory.mover import Copies, CopyFailed, Event, Memory, Stream

_MAP_FIXED, _MAP_FIXED_NOREPLACE, _MAP_NORESERVE = 0x10, 0x100000, 0x4000
_PROT_NONE: Final = 0
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_NOTHING: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mmap(address: int, nbytes: int, protection: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    found: int | None = _libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return found


class MemoryFile:
    """Memory behind a descriptor, without a name in any file system: it goes with its last user."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes

    @classmethod
    def make(cls, name: str, nbytes: int) -> MemoryFile:
        """Zeroed, and taken from the machine page by page as it is touched."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, nbytes)

    def export(self) -> int:
        return os.dup(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)

    def map(self, offset: int, nbytes: int, address: int = 0) -> int:
        """Map a part of it, over what is at ``address`` where that is given; its address."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) of {self.nbytes} bytes")
        return _mmap(address, nbytes, _READ_WRITE, mmap.MAP_SHARED | (_MAP_FIXED if address else 0), self.descriptor, offset)


def unmap(address: int, nbytes: int) -> None:
    """The range is free for any other use. Raises OSError."""
    if _libc.munmap(address, nbytes):
        raise OSError(ctypes.get_errno(), "munmap")


class CpuEvent:
    """Set by the copying thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise CopyFailed(f"a copy failed: {self._error!r}") from self._error

    def hold_compute(self) -> None:
        self.wait()


class CpuStream:
    """A thread that copies in order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Copies, Sequence[Any], CpuEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="talaria-copies", daemon=True)
        self._thread.start()

    def copy(self, copies: Copies, after: Sequence[Any] = ()) -> Event:
        event = CpuEvent()
        self._work.put((copies, after, event))
        return event

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            copies, after, event = work
            try:
                for earlier in after:
                    earlier.synchronize()
                self.move(copies)
            except BaseException as error:
                event.end(error)
            else:
                event.end()

    def move(self, copies: Copies) -> None:
        memmove = ctypes.memmove  # it lets other threads run meanwhile
        for to, source, nbytes in zip(copies.to.tolist(), copies.source.tolist(), copies.nbytes.tolist(), strict=True):
            memmove(to, source, nbytes)


class CpuMover:
    granule_bytes = mmap.PAGESIZE

    def reserve(self, nbytes: int, at: int = 0) -> int:
        return _mmap(at, nbytes, _PROT_NONE, _NOTHING | (_MAP_FIXED_NOREPLACE if at else 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        unmap(address, nbytes)

    def create(self, nbytes: int) -> Memory:
        return MemoryFile.make("talaria-device", nbytes)

    def adopt(self, descriptor: int, nbytes: int) -> Memory:
        return MemoryFile(descriptor, nbytes)

    def map(self, address: int, memories: Sequence[Memory]) -> None:
        for memory in memories:
            assert isinstance(memory, MemoryFile)
            memory.map(0, memory.nbytes, address)
            address += memory.nbytes

    def unmap(self, address: int, memories: Sequence[Memory]) -> None:
        _mmap(address, sum(memory.nbytes for memory in memories), _PROT_NONE, _NOTHING | _MAP_FIXED)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def pin(self, address: int, nbytes: int) -> None:
        """Threads reach all memory as it is."""

    def unpin(self, address: int) -> None:
        """Nothing was pinned."""

    def stream(self) -> Stream:
        return CpuStream()
