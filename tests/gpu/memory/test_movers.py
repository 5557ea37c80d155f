"""The CPU's mover on real bytes: addresses that stay, memory that comes and goes and is shared, copies in order behind events."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.gpu.memory.cpu import CpuMover, CpuStream, MemoryFile, unmap
from talaria.gpu.memory.cuda import CudaMemory, CudaMover
from talaria.gpu.memory.mover import Copies, CopyFailed

PAGE = CpuMover.granule_bytes


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def copies(*items: tuple[int, int, int]) -> Copies:
    return Copies(*(np.array(column, dtype=np.int64) for column in zip(*items, strict=True)))


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    stream = CpuStream()
    yield stream
    stream.close()


def test_memory_comes_and_goes_under_addresses_that_stay() -> None:
    mover = CpuMover()
    base = mover.reserve(4 * PAGE)
    weights, others = mover.create(2 * PAGE), mover.create(2 * PAGE)
    mover.map(base + PAGE, [weights])
    write(base + PAGE, b"weights")
    mover.unmap(base + PAGE, [weights])
    mover.map(base + PAGE, [others])
    assert read(base + PAGE, 7) == bytes(7)
    mover.unmap(base + PAGE, [others])
    mover.map(base + 2 * PAGE, [weights])
    assert read(base + 2 * PAGE, 7) == b"weights"
    with pytest.raises(OSError):
        mover.reserve(PAGE, at=base + PAGE)
    mover.unmap(base + 2 * PAGE, [weights])
    mover.unreserve(base, 4 * PAGE)
    assert mover.reserve(PAGE, at=base) == base
    mover.unreserve(base, PAGE)
    weights.close()
    others.close()


def test_what_is_unmapped_cannot_be_read() -> None:
    code = """
    import ctypes
    from talaria.gpu.memory.cpu import CpuMover
    mover = CpuMover()
    base = mover.reserve(mover.granule_bytes)
    memory = mover.create(mover.granule_bytes)
    mover.map(base, [memory])
    ctypes.string_at(base, 1)
    mover.unmap(base, [memory])
    print("unmapped", flush=True)
    ctypes.string_at(base, 1)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-11, "unmapped\n")


def test_another_process_maps_what_this_one_exports() -> None:
    code = """
    import ctypes, socket, sys
    from talaria.gpu.memory.cpu import CpuMover
    mover = CpuMover()
    peer = socket.socket(fileno=int(sys.argv[1]))
    _, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
    memory = mover.adopt(descriptor, 2 * mover.granule_bytes)
    base = mover.reserve(memory.nbytes)
    mover.map(base, [memory])
    found = ctypes.string_at(base, 5)
    ctypes.memmove(base + mover.granule_bytes, found[::-1], 5)
    """
    mover = CpuMover()
    memory = mover.create(2 * PAGE)
    base = mover.reserve(2 * PAGE)
    mover.map(base, [memory])
    write(base, b"hello")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(theirs.fileno())], pass_fds=[theirs.fileno()])
        descriptor = memory.export()
        socket.send_fds(ours, [b"\0"], [descriptor])
        os.close(descriptor)
        assert child.wait(timeout=60) == 0
    assert read(base + PAGE, 5) == b"olleh"
    mover.unmap(base, [memory])
    mover.unreserve(base, 2 * PAGE)
    memory.close()


class Driver:
    """Says yes to everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[int, None]]:
        def call(*arguments: Any) -> tuple[int, None]:
            self.calls.append((name, *arguments))
            return 0, None

        return call


def test_cuda_is_asked_for_access_to_a_window_once() -> None:
    driver = Driver()
    mover = CudaMover.__new__(CudaMover)
    mover._driver, mover._access = driver, "all"
    memories = [CudaMemory(driver, handle, 2 * PAGE) for handle in "ba"]
    mover.map(PAGE, memories)
    mover.unmap(PAGE, memories)
    assert driver.calls == [
        ("cuMemMap", PAGE, 2 * PAGE, 0, "b", 0), ("cuMemMap", 3 * PAGE, 2 * PAGE, 0, "a", 0),
        ("cuMemSetAccess", PAGE, 4 * PAGE, ["all"], 1), ("cuMemUnmap", PAGE, 2 * PAGE), ("cuMemUnmap", 3 * PAGE, 2 * PAGE),
    ]  # fmt: skip


def test_memory_outlives_its_handle() -> None:
    mover = CpuMover()
    memory = mover.create(PAGE)
    base = mover.reserve(PAGE)
    mover.map(base, [memory])
    memory.close()
    write(base, b"still")
    assert read(base, 5) == b"still"
    unmap(base, PAGE)


def test_a_part_of_a_memory_file_is_mapped_and_no_more() -> None:
    file = MemoryFile.make("test", 3 * PAGE)
    whole, part = file.map(0, 3 * PAGE), file.map(PAGE, PAGE)
    write(whole + PAGE, b"part")
    assert read(part, 4) == b"part"
    with pytest.raises(ValueError, match="of 12288 bytes"):
        file.map(2 * PAGE, 2 * PAGE)
    unmap(whole, 3 * PAGE)
    unmap(part, PAGE)
    file.close()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_copies_take_effect_in_order(data: st.DataObject) -> None:
    """Random, overlapping copies within one range, in batches, against the same on a bytearray."""
    size = 256
    draw = data.draw(
        st.lists(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1), st.integers(1, 64)), max_size=6), max_size=6)
    )
    model = bytearray(random.Random(1).randbytes(size))
    buffer = ctypes.create_string_buffer(bytes(model), size)
    base = ctypes.addressof(buffer)
    stream = CpuStream()
    events = []
    for batch in draw:
        items = [(to, source, min(nbytes, size - max(to, source))) for to, source, nbytes in batch]
        if items:
            events.append(stream.copy(copies(*((base + to, base + source, nbytes) for to, source, nbytes in items))))
        for to, source, nbytes in items:
            model[to : to + nbytes] = model[source : source + nbytes]
    for event in events:
        event.wait()
    assert buffer.raw == bytes(model)
    stream.close()


class Gate:
    """An event of PyTorch, as far as copies know it."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        assert self.opened.wait(60)


def test_copies_wait_for_events_and_the_caller_does_not(stream: CpuStream) -> None:
    source, target = ctypes.create_string_buffer(b"old", 3), ctypes.create_string_buffer(3)
    gate = Gate()
    event = stream.copy(copies((ctypes.addressof(target), ctypes.addressof(source), 3)), [gate])
    assert not event.done()
    source.raw = b"new"
    gate.opened.set()
    event.wait()
    assert event.done()
    assert target.raw == b"new"


def test_a_failed_copy_is_told_by_its_event_and_by_no_other(stream: CpuStream) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("the device is gone")

    source, target = ctypes.create_string_buffer(b"abc", 3), ctypes.create_string_buffer(3)
    work = copies((ctypes.addressof(target), ctypes.addressof(source), 3))
    broken, fine = stream.copy(work, [Broken()]), stream.copy(work)
    with pytest.raises(CopyFailed, match="the device is gone"):
        broken.wait()
    fine.wait()
    assert target.raw == b"abc"


def test_a_closed_stream_has_done_all_its_work() -> None:
    stream = CpuStream()
    source, target = ctypes.create_string_buffer(b"abc", 3), ctypes.create_string_buffer(3)
    event = stream.copy(copies((ctypes.addressof(target), ctypes.addressof(source), 3)))
    stream.close()
    assert event.done()
    assert target.raw == b"abc"
