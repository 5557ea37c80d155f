"""An engine's pages with a thread that stages in them: real bytes, real threads, and allocations that know nothing of staging."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from talaria.gpu.memory.arena import Arena
from talaria.gpu.memory.cpu import CpuMover, CpuStream, MemoryFile, unmap
from talaria.gpu.memory.gather import NOTHING, Image, Ledger
from talaria.gpu.memory.mover import Copies, CopyFailed, Event
from talaria.gpu.memory.stager import KvRegion, Stager
from talaria.gpu.memory.tail import Figures, Tail
from talaria.substrate.pages import Extent, OutOfPages
from tests.gpu.cluster import wait_for

CHUNK = CpuMover.granule_bytes
PAGE_BYTES = 1000
"""Does not divide a block: its rest lies before the first page."""
LAYERS, LAYER_CHUNKS, WEIGHT_CHUNKS = 2, 6, 7.4
UNLIMITED = float("inf")
KV = 0xEE


class Rank:
    """One rank's arena, with a model that serves and the image of another; ``pages`` are fewer than its blocks have room for."""

    def __init__(
        self, stream: CpuStream | None = None, seed: int = 1, page_bytes: int = PAGE_BYTES, weight_chunks: float = WEIGHT_CHUNKS
    ) -> None:
        nbytes = int(weight_chunks * CHUNK) // 16 * 16
        first = int(weight_chunks) + 1
        self.arena = Arena(CpuMover(), first + LAYERS * LAYER_CHUNKS, CHUNK)
        self.window, self.check = self.arena.window(), self.arena.window()
        self.arena.show(self.window, range(self.arena.count))
        self.arena.show(self.check, range(self.arena.count))
        self.region = KvRegion(first, LAYERS, LAYER_CHUNKS, page_bytes)
        self.weights = random.Random(seed).randbytes(nbytes)
        file = MemoryFile.make("image", nbytes)
        self.image = Image(file.map(0, nbytes), nbytes)
        file.close()
        ctypes.memmove(self.image.address, self.weights, nbytes)
        self.stream = stream or CpuStream()
        self.tail = Tail(self.region.pages(CHUNK) - 1)
        self.told: list[Figures] = []

    def open(self) -> Stager:
        stager = Stager(self.arena, self.window, self.region, self.stream)
        self.tail.open(stager, tell=self.told.append)
        return stager

    def alloc(self, pages: int) -> list[Extent]:
        """As an engine does, and writes KV there in every layer."""
        extents = self.tail.alloc(pages)
        for first, count in extents:
            for layer in range(LAYERS):
                end = self.window.address + (self.region.first + (layer + 1) * LAYER_CHUNKS) * CHUNK
                page_bytes = self.region.page_bytes
                ctypes.memset(end - (self.region.pages(CHUNK) - first) * page_bytes, KV, count * page_bytes)
        return extents

    def wrong(self, ledger: Ledger) -> list[int]:
        """Chunks that are said to be staged and are not."""
        return [
            chunk
            for chunk, place in ledger.staged.items()
            if ctypes.string_at(self.check.address + place * CHUNK, self.image.size(chunk, CHUNK))
            != self.weights[chunk * CHUNK : (chunk + 1) * CHUNK]
        ]

    def close(self) -> None:
        self.tail.close()
        self.stream.close()
        self.arena.close()
        unmap(self.image.address, self.image.nbytes)


class Gated(CpuStream):
    """Copies when it is let."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__()

    def move(self, copies: Copies) -> None:
        self.begun.release()
        assert self.let.acquire(timeout=60)
        super().move(copies)


def until(condition: Callable[[], bool]) -> None:
    wait_for("it happens", condition, 60)


@pytest.mark.parametrize("operations", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_no_page_that_was_written_is_ever_gathered(operations: int) -> None:
    draw, rank = random.Random(operations), Rank()
    held: list[list[Extent]] = []
    used: set[int] = set()
    paths = {"whole": 0, "some": 0, "none": 0}
    dirty = 0
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    for number in range(operations):
        if draw.random() < (0.4 if len(used) > rank.tail.total // 2 else 0.55):
            count = draw.randrange(1, 6)
            before = rank.tail.free_pages
            try:
                extents = rank.alloc(count)
            except OutOfPages:
                assert count > before
            else:
                taken = {page for first, size in extents for page in range(first, first + size)}
                assert len(taken) == count and not taken & used and max(taken) < rank.tail.total
                used |= taken
                held.append(extents)
        elif held:
            extents = held.pop(draw.randrange(len(held)))
            rank.tail.free(extents)
            used.difference_update(page for first, size in extents for page in range(first, first + size))
        assert rank.tail.free_pages == rank.tail.total - len(used)
        if number % 500 == 499:
            dirty += rank.tail.figures().dirty_bytes
            ledger = rank.tail.park()
            assert not rank.wrong(ledger)
            paths["whole" if len(ledger.staged) == int(WEIGHT_CHUNKS) + 1 else "some" if ledger.staged else "none"] += 1
            if number % 2000 == 1999:  # a flush
                rank.tail.free_all(rank.tail.total)
                held.clear()
                used.clear()
                dirty += some_is_written_over(rank)
                paths["some"] += 1
            rank.open()
            rank.tail.stage("next", rank.image, UNLIMITED)
    rank.close()
    assert dirty > 0 and paths["some"] > 0


def some_is_written_over(rank: Rank) -> int:
    """On a machine of any speed: half of the pages are taken when everything is staged. Returns the bytes that it costs."""
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    until(lambda: rank.tail.figures().clean_bytes == rank.image.nbytes)
    rank.alloc(rank.tail.total // 2)
    dirty_bytes = rank.tail.figures().dirty_bytes
    ledger = rank.tail.park()
    assert not rank.wrong(ledger) and 0 < len(ledger.staged) < int(WEIGHT_CHUNKS) + 1
    rank.tail.free_all(rank.tail.total)
    return dirty_bytes


def test_an_allocation_goes_around_the_chunk_that_is_being_written() -> None:
    gated = Gated()
    rank = Rank(gated)
    stager = rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    assert gated.begun.acquire(timeout=60)
    writing = stager.map.in_flight_pages
    assert writing is not None and sum(writing) == rank.tail.total + 1, "the block ends one page behind the engine's pages"
    around = rank.alloc(rank.tail.total - (writing[1] - 1))
    assert around == [(0, writing[0])]
    gated.let.release()
    until(lambda: rank.tail.figures().clean_bytes == CHUNK)
    for _ in range(20):
        gated.let.release()
    assert not rank.wrong(rank.tail.park())
    rank.close()


def test_where_there_is_no_other_room_the_chunk_is_given_up_and_how_many_pages_are_free_is_the_same() -> None:
    gated = Gated()
    rank = Rank(gated)
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    assert gated.begun.acquire(timeout=60)
    assert rank.tail.free_pages == rank.tail.total
    with pytest.raises(OutOfPages):
        rank.tail.alloc(rank.tail.total + 1)
    for _ in range(20):
        gated.let.release()
    assert rank.alloc(rank.tail.total) == [(0, rank.tail.total)]
    assert rank.tail.park().staged == {}
    rank.close()


def test_a_flush_leaves_the_first_page_to_its_owner_however_much_there_is_to_stage() -> None:
    """SGLang writes padding there; these weights would fill all of KV."""
    rank = Rank(page_bytes=CHUNK // 4, weight_chunks=LAYERS * LAYER_CHUNKS)
    rank.tail.free_all(rank.tail.total, kept=1)
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    room = LAYERS * (LAYER_CHUNKS - 1) * CHUNK
    until(lambda: rank.tail.figures().clean_bytes == room)
    for _ in range(50):
        rank.tail.free_all(rank.tail.total, kept=1)
        rank.alloc(2)
    assert rank.tail.figures().clean_bytes == room
    rank.tail.free_all(rank.tail.total, kept=1)
    assert rank.alloc(rank.tail.total - 1) == [(1, rank.tail.total - 1)]
    rank.close()


def test_a_rate_is_kept_and_can_be_changed() -> None:
    rank = Rank()
    rank.open()
    rank.tail.stage("next", rank.image, 1e-3)
    until(lambda: rank.tail.figures().clean_bytes == CHUNK)
    assert rank.tail.figures().clean_bytes == CHUNK, "the next chunk is due in a month"
    rank.tail.stage("next", rank.image, UNLIMITED)
    until(lambda: rank.tail.figures().clean_bytes == rank.image.nbytes)
    figures = rank.tail.figures()
    assert (figures.target, figures.weight_bytes, figures.dirty_bytes) == ("next", rank.image.nbytes, 0)
    assert figures.slack_bytes == (LAYERS * (LAYER_CHUNKS - 1) - 8) * CHUNK
    rank.close()


def test_what_was_written_over_is_staged_again_when_its_pages_are_free() -> None:
    rank = Rank()
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    until(lambda: rank.tail.figures().clean_bytes == rank.image.nbytes)
    extents = rank.alloc(rank.tail.total)
    assert rank.tail.figures().dirty_bytes == rank.image.nbytes
    rank.tail.free(extents)
    until(lambda: rank.tail.figures().clean_bytes == rank.image.nbytes)
    ledger = rank.tail.park()
    assert len(ledger.staged) == 8 and ledger.dirty_bytes == 0 and not rank.wrong(ledger)
    rank.close()


def test_another_target_voids_the_first_and_none_ends_staging() -> None:
    rank = Rank()
    rank.tail.stage("next", rank.image, UNLIMITED)
    assert rank.tail.park() == NOTHING, "no model is active"
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    rank.tail.stage("other", rank.image, UNLIMITED)
    until(lambda: rank.tail.figures().clean_bytes == rank.image.nbytes)
    assert rank.tail.figures().target == "other"
    rank.tail.unstage()
    assert rank.tail.figures().target == "" and rank.tail.park() == NOTHING
    rank.close()


def test_it_tells_how_far_it_is_and_when_that_changes() -> None:
    rank = Rank()
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    until(lambda: bool(rank.told) and rank.told[-1].clean_bytes == rank.image.nbytes)
    rank.alloc(rank.tail.total)
    until(lambda: rank.told[-1][:5] == ("next", rank.image.nbytes, 0, rank.image.nbytes, 0))
    assert rank.told[-1].copied_bytes == rank.image.nbytes and rank.told[-1].copying_s > 0.0
    rank.tail.unstage()
    until(lambda: rank.told[-1] == Figures())
    rank.close()


class Broken(CpuStream):
    def move(self, copies: Copies) -> None:
        raise RuntimeError("no")


class Refusing(CpuStream):
    def copy(self, copies: Copies, after: Sequence[Any] = ()) -> Event:
        raise CopyFailed("no")


@pytest.mark.parametrize("stream", [Broken, Refusing])
def test_a_copy_that_fails_ends_staging_and_not_the_engine(stream: type[CpuStream]) -> None:
    rank = Rank(stream())
    rank.open()
    rank.tail.stage("next", rank.image, UNLIMITED)
    until(lambda: rank.tail.figures().target == "")
    extents = rank.alloc(rank.tail.total)
    assert extents == [(0, rank.tail.total)]
    rank.tail.free(extents)
    rank.tail.stage("other", rank.image, UNLIMITED)
    until(lambda: rank.tail.figures().target == "")
    assert rank.tail.park() == NOTHING
    rank.close()
