"""What the CUDA mover asks of the driver to pin host memory, and to copy from and to it; the driver is a record of its calls."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from talaria.gpu.memory import cuda
from talaria.gpu.memory.cpu import MemoryFile, unmap
from talaria.gpu.memory.cuda import PIN_STEP, CudaMover, cut
from talaria.gpu.memory.mover import Copies, CopyFailed

PAGE = 4096


def copies(*items: tuple[int, int, int]) -> Copies:
    return Copies(*np.array(items, dtype=np.int64).T)


def bytes_of(some: Copies) -> list[tuple[int, int, int]]:
    """As few copies as say the same."""
    joined: list[tuple[int, int, int]] = []
    for to, source, nbytes in sorted(zip(*(column.tolist() for column in some), strict=True)):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (to, source):
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + nbytes)
        else:
            joined.append((to, source, nbytes))
    return joined


def test_copies_are_cut_where_pinned_memory_is() -> None:
    draw = random.Random(1)
    for _ in range(200):
        items = [
            (
                (number << 40) + draw.randrange(4 * PIN_STEP),
                draw.randrange(1 << 45),
                draw.choice((1, PAGE, draw.randrange(1, 5 * PIN_STEP))),
            )
            for number in range(1, draw.randrange(2, 9))
        ]
        done = cut(copies(*items))
        assert bytes_of(done) == items
        for column in (done.to, done.source):
            assert (column // PIN_STEP == (column + done.nbytes - 1) // PIN_STEP).all()
    small = copies((PAGE, 7 * PAGE, PAGE), (0, PIN_STEP, PIN_STEP))
    assert cut(small) is small
    nothing = Copies(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    assert cut(nothing) is nothing

NOWHERE = (1 << 50) + 3 * PIN_STEP
"""Where no process has memory."""


class Driver:
    """Success for whatever is asked; ``pinned`` is what is registered, as many pieces as are let."""

    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.lets = 10**6

    def __getattr__(self, name: str) -> Any:
        """Another function, or the names of an enumeration."""
        return Names() if name.startswith("CU") else lambda *_: (0, 1)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[int]:
        assert not flags and address not in self.pinned
        if len(self.pinned) == self.lets:
            return (2,)
        self.pinned[address] = nbytes
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)


class Names:
    def __getattr__(self, name: str) -> int:
        return 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    return made


@pytest.mark.parametrize("address", [NOWHERE, NOWHERE - PAGE, NOWHERE + PAGE])
@pytest.mark.parametrize("nbytes", [512, PAGE, PIN_STEP - PAGE, PIN_STEP, 5 * PIN_STEP + 512])
def test_host_memory_is_pinned_piece_by_piece(driver: Driver, address: int, nbytes: int) -> None:
    mover = CudaMover()
    mover.pin(address, nbytes)
    at = address
    for first, size in sorted(driver.pinned.items()):
        assert first == at and first // PIN_STEP == (first + size - 1) // PIN_STEP
        at += size
    assert at == address + nbytes
    mover.unpin(address)
    assert not driver.pinned


def test_what_cannot_be_pinned_as_a_whole_is_not_at_all(driver: Driver) -> None:
    mover = CudaMover()
    driver.lets = 3
    with pytest.raises(CopyFailed):
        mover.pin(NOWHERE, 9 * PIN_STEP)
    assert not driver.pinned


def test_memory_that_is_pinned_is_there_before(driver: Driver) -> None:
    memory = MemoryFile.make("pinned", 64 * PAGE)
    address = memory.map(0, 64 * PAGE)
    able = cuda._libc.madvise(address, PAGE, cuda._POPULATE) == 0
    CudaMover().pin(address, 64 * PAGE - 512)
    there = os.fstat(memory.descriptor).st_blocks * 512
    unmap(address, 64 * PAGE)
    memory.close()
    if not able:
        pytest.skip("this kernel brings no pages on request")
    assert there >= 64 * PAGE
