"""No page is given out with another model's weights in it, and wiping them touches no page that is in use."""

from __future__ import annotations

import ctypes
import random

import pytest

from talaria.gpu.hooks.soil import Soil
from talaria.gpu.memory.arena import Arena
from talaria.gpu.memory.cpu import CpuMover, CpuStream, MemoryFile, unmap
from talaria.gpu.memory.gather import Image
from talaria.gpu.memory.stager import KvRegion, Stager
from talaria.substrate.pages import Extent, PagePool

CHUNK = CpuMover.granule_bytes
WEIGHT, KV = 0xEE, 0x11


def play(seed: int, *, wipes: bool) -> bool:
    """Random steps of staging for one target after another, and allocations; whether a page was given out with weights in it."""
    draw = random.Random(seed)
    layers, layer_chunks, page_bytes, weight_chunks = draw.randrange(1, 4), draw.randrange(2, 6), draw.choice((512, 768, 5120)), 3
    arena = Arena(CpuMover(), weight_chunks + layers * layer_chunks, CHUNK)
    window = arena.window()
    arena.show(window, range(arena.count))
    file = MemoryFile.make("image", 7 * CHUNK)
    image = Image(file.map(0, 7 * CHUNK), 7 * CHUNK)
    file.close()
    ctypes.memset(image.address, WEIGHT, image.nbytes)
    region = KvRegion(weight_chunks, layers, layer_chunks, page_bytes)
    stream = CpuStream()
    soil = Soil(stream, window, region, CHUNK)
    stager = Stager(arena, window, region, soil)
    pool = PagePool(region.pages(CHUNK))
    rest = layer_chunks * CHUNK % page_bytes
    held: list[list[Extent]] = []

    def rows(extents: list[Extent]) -> list[tuple[int, int]]:
        blocks = [window.address + (region.first + layer * layer_chunks) * CHUNK + rest for layer in range(layers)]
        return [(block + first * page_bytes, count * page_bytes) for block in blocks for first, count in extents]

    def only(extents: list[Extent], *allowed: int) -> bool:
        return all(set(ctypes.string_at(*row)) <= set(allowed) for row in rows(extents))

    stager.begin("b", image, 0)
    soiled = False
    for number in range(300):
        action = draw.random()
        if action < 0.5:
            stager.step(pool.high_water)
        elif action < 0.7:
            pages = draw.randrange(1, 9)
            if pages <= pool.free_pages:
                stager.cancel_in_flight()
                extents = pool.alloc(pages)
                stager.map.dirty(extents)
                for address in soil.take(extents) if wipes else ():
                    ctypes.memset(address, 0, CHUNK)
                soiled |= not only(extents, 0, KV)
                for row in rows(extents):
                    ctypes.memset(row[0], KV, row[1])
                held.append(extents)
                assert not soil.take(extents) or not wipes, "wiped once"
        elif action < 0.97 and held:
            extents = held.pop(draw.randrange(len(held)))
            assert only(extents, KV), "somebody wrote over a page in use"
            pool.free(extents)
        elif action >= 0.97:
            stager.settle()
            stager.begin(str(number), image, pool.high_water)
    soil.close()
    arena.close()
    unmap(image.address, image.nbytes)
    return soiled


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_given_out_without_weights_in_them(seed: int) -> None:
    assert not play(seed, wipes=True)


def test_they_would_be_without_wiping() -> None:
    assert sum(play(seed, wipes=False) for seed in range(20)) > 10


def test_a_new_pool_has_nothing_to_wipe() -> None:
    arena = Arena(CpuMover(), 4, CHUNK)
    window = arena.window()
    arena.show(window, range(4))
    file = MemoryFile.make("image", CHUNK)
    image = Image(file.map(0, CHUNK), CHUNK)
    file.close()
    soil = Soil(CpuStream(), window, KvRegion(0, 2, 2, 512), CHUNK)
    stager = Stager(arena, window, KvRegion(0, 2, 2, 512), soil)
    stager.begin("b", image, 0)
    assert stager.step(0)
    stager.settle()
    soil.forget()
    assert soil.take([(0, 16)]) == []
    soil.forget(soiled=True)
    assert soil.take([(8, 8)]) == [window.address + chunk * CHUNK for chunk in (1, 3)]
    assert soil.take([(0, 16)]) == [window.address + chunk * CHUNK for chunk in (0, 2)]
    soil.close()
    arena.close()
    unmap(image.address, image.nbytes)
