"""A dirty chunk is never gathered: page allocations and staging at random, against one bit mask of pages for each chunk."""

from __future__ import annotations

import random

import pytest

from talaria.substrate.pages import PagePool
from talaria.substrate.staging import StagingMap

LAYERS, CHUNK, PAGES, PAGE, WEIGHTS = 3, 96, 64, 40, 1900


class Masks:
    """Which chunks hold the target's bytes, by the letter of SPEC §5.3."""

    def __init__(self) -> None:
        layer_bytes = PAGES * PAGE
        self.rows = []
        for chunk in range(-(-WEIGHTS // CHUNK)):
            high = layer_bytes - chunk // LAYERS * CHUNK
            first, last = (high - CHUNK) // PAGE, -(-high // PAGE)
            self.rows.append((1 << last) - (1 << first))
        self.clean: set[int] = set()

    def taken(self, extents: list[tuple[int, int]]) -> None:
        for first, count in extents:
            pages = ((1 << count) - 1) << first
            self.clean = {chunk for chunk in self.clean if not self.rows[chunk] & pages}


@pytest.mark.parametrize("operations", [30_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_what_is_gathered_was_staged_and_not_overwritten_since(operations: int) -> None:
    draw = random.Random(operations)
    staging, masks, pool = StagingMap(LAYERS, CHUNK, PAGES, PAGE), Masks(), PagePool(PAGES)
    staging.begin("next", WEIGHTS, 0)
    held: list[list[tuple[int, int]]] = []
    gathered = dirtied = 0
    for _ in range(operations):
        action = draw.random()
        if action < 0.4:
            before = staging.in_flight
            staging.advance(draw.randrange(1, 130), pool.high_water)
            plan = staging.gather_plan()
            now = {chunk for first, count in plan.clean for chunk in range(first, first + count)}
            used = sum(((1 << count) - 1) << first for extents in held for first, count in extents)
            new = now - masks.clean
            assert masks.clean <= now and all(chunk == before or not masks.rows[chunk] & used for chunk in new)
            masks.clean = now
            gathered += len(new)
        elif action < 0.7:
            writing = staging.in_flight_pages
            if writing is not None:
                pool.block(*writing)
            pages = draw.randrange(1, 12)
            if pages <= pool.free_pages:
                extents = pool.alloc(pages)
                held.append(extents)
                staging.dirty(extents)
                clean = len(masks.clean)
                masks.taken(extents)
                dirtied += clean - len(masks.clean)
                assert staging.clean_bytes == sum(min(CHUNK, WEIGHTS - chunk * CHUNK) for chunk in masks.clean)
            if writing is not None:
                pool.unblock(*writing)
        elif held:
            pool.free(held.pop(draw.randrange(len(held))))
    assert gathered > operations // 100 and dirtied > operations // 200
