"""The judge of the arena's random test, without engines: it finds nothing wrong with the store, and something with each that is broken."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.memory.store import HostStore, Seat
from tests.gpu.memory.bystander import MODEL, Bystander
from tests.gpu.memory.ranks import SLAB_BYTES
from tests.gpu.memory.witness import Witness

SLABS, STEPS, PATIENCE_S = 64, 60, 60.0


async def walk(directory: Path, ranks: int, seed: int) -> Witness:
    """Random steps of one model's ranks in a pool that is too small for them."""
    memory, draw = MemoryServer(SLABS * SLAB_BYTES * ranks, ranks, SLAB_BYTES), random.Random(seed)
    await memory.start(directory / "memory")
    witness, model = Witness(memory, 0, MODEL), Bystander(memory, draw)
    try:
        await model.join()
        for _ in range(STEPS):
            await step(model, witness, draw)
            witness.check()
        if model.copying:
            await model.end()
        witness.let_go()
        await model.leave()
        async with asyncio.timeout(PATIENCE_S):
            while not witness.idle():
                await asyncio.sleep(0.01)
        witness.check_idle()
    finally:
        await model.leave()
        await memory.stop()
    return witness


async def step(model: Bystander, witness: Witness, draw: random.Random) -> None:
    kind = draw.choice(("copy", "copy", "crowd", "come back", "come back", "keep", "let go", "clear"))
    if kind == "copy" and not model.copying:
        asked = witness.seen["save"]
        model.begin()
        async with asyncio.timeout(PATIENCE_S):
            while witness.seen["save"] < asked + witness.ranks:
                await asyncio.sleep(0.001)
    elif kind in ("copy", "crowd") and model.copying:
        await model.end()
    elif kind == "crowd":
        await model.crowd(draw.randint(1, 12))
    elif kind == "come back" and not model.copying:
        await model.come_back()
    elif kind == "keep":
        witness.keep(witness.name(MODEL), draw.randrange(100), pinned=draw.random() < 0.5)
    elif kind == "let go":
        witness.let_go()
    elif kind == "clear" and draw.random() < 0.3:
        witness.clear()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_is_right_is_found_right(tmp_path: Path, ranks: int) -> None:
    seen: Counter[str] = sum((asyncio.run(walk(tmp_path, ranks, seed)).seen for seed in range(5)), Counter())
    for what in (f"pages evicted of {MODEL}", f"pages restored of {MODEL}", "clear", "pins alone", "references alone"):
        assert seen[what], (what, seen)


Broken = Callable[[pytest.MonkeyPatch], None]


def exposes_what_one_rank_has(patch: pytest.MonkeyPatch) -> None:
    ended = HostStore._ended

    def broken(self: HostStore, seat: Seat, number: int, *, complete: bool) -> None:
        given = [(checkpoint.done, pages) for checkpoint, pages in seat.grants.get(number, ())]
        ended(self, seat, number, complete=complete)
        for ranks, pages in given:
            for done in ranks:
                for first, count in pages:
                    for start, size in list(done.gaps(first, first + count)):
                        done.add(start, size)
        for number, checkpoint in list(self._open.get(seat.model, {}).items()):
            if all(done.total == checkpoint.pages for done in checkpoint.done):
                self.registry.commit_all(self._open[seat.model].pop(number).ticket)

    patch.setattr(HostStore, "_ended", broken)


def lets_writers_slabs_go(patch: pytest.MonkeyPatch) -> None:
    close = HostStore._close

    def broken(self: HostStore, checkpoint: Any) -> None:
        writers, checkpoint.writers = checkpoint.writers, 0
        close(self, checkpoint)
        checkpoint.writers = writers

    patch.setattr(HostStore, "_close", broken)


def leaks_references(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostStore, seat: Seat, request: str, *, complete: bool = True) -> None:
        held = seat.held.pop(request, None)
        if held is not None and held.pin is not None:
            self.registry.unpin(held.pin)

    patch.setattr(HostStore, "done", broken)


def takes_a_pin_for_a_reference(patch: pytest.MonkeyPatch) -> None:
    def broken(self: HostStore, seat: Seat, request: str, pages: int) -> None:
        held = seat.held[request]
        self.registry.ref(seat.model, held.spans, held.reference.path[-1][2])

    patch.setattr(HostStore, "pin", broken)


def finds_less_than_there_is(patch: pytest.MonkeyPatch) -> None:
    find = HostStore.find

    def broken(self: HostStore, seat: Seat, request: str, digests: Any) -> tuple[int, list[int]]:
        pages, slabs = find(self, seat, request, digests)
        return max(0, pages - 2), slabs[: max(0, pages - 2) * seat.page_slabs]

    patch.setattr(HostStore, "find", broken)


@pytest.mark.parametrize(
    "breaks",
    [
        exposes_what_one_rank_has, lets_writers_slabs_go, leaks_references, takes_a_pin_for_a_reference, finds_less_than_there_is,
    ],
)  # fmt: skip
def test_a_store_that_is_broken_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Broken) -> None:
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(3):
            asyncio.run(walk(tmp_path, 2, seed))
