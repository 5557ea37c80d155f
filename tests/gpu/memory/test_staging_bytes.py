"""Staging and switching on real bytes: what was written over is never gathered, and a switch reads from the host exactly the rest."""

from __future__ import annotations

import ctypes
import random
import threading
from dataclasses import dataclass

import pytest

from talaria.gpu.memory.arena import Arena, Window
from talaria.gpu.memory.cpu import CpuMover, CpuStream, MemoryFile, unmap
from talaria.gpu.memory.gather import Image, gather
from talaria.gpu.memory.mover import Copies, CopyFailed
from talaria.gpu.memory.stager import KvRegion, Stager
from talaria.substrate.pages import PagePool

CHUNK = CpuMover.granule_bytes
PAGE_BYTES = 512


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@dataclass
class Model:
    """Its weights on the host and where its window shows them."""

    weights: bytes
    image: Image
    window: Window

    @property
    def chunks(self) -> int:
        return -(-len(self.weights) // CHUNK)


class Device:
    """A device with an arena and two models, of which one is active."""

    def __init__(self, draw: random.Random, *, layers: int = 3, layer_chunks: int = 4, weight_chunks: float = 7.4) -> None:
        self.draw, self.layers, self.layer_chunks = draw, layers, layer_chunks
        count = int(weight_chunks) + 1 + layers * layer_chunks
        self.arena = Arena(CpuMover(), count, CHUNK)
        self.stream = CpuStream()
        self.models = {name: self._model(int(weight_chunks * CHUNK) // 16 * 16) for name in ("a", "b")}
        self.active = "a"
        self.arena.show(self.models["a"].window, draw.sample(range(count), count))
        ctypes.memmove(self.models["a"].window.address, self.models["a"].weights, len(self.models["a"].weights))
        self._begin()

    def _model(self, nbytes: int) -> Model:
        file, weights = MemoryFile.make("image", nbytes), self.draw.randbytes(nbytes)
        address = file.map(0, nbytes)
        file.close()
        ctypes.memmove(address, weights, nbytes)
        return Model(weights, Image(address, nbytes), self.arena.window())

    def _begin(self) -> None:
        model = self.models[self.active]
        self.region = KvRegion(model.chunks, self.layers, self.layer_chunks, PAGE_BYTES)
        self.stager = Stager(self.arena, model.window, self.region, self.stream)
        self.pool = PagePool(self.region.pages(CHUNK))
        self.held: list[list[tuple[int, int]]] = []
        self.other = "b" if self.active == "a" else "a"
        self.stager.begin(self.other, self.models[self.other].image, 0)

    def allocate(self, pages: int) -> None:
        """As the engine does, and writes KV there in every layer."""
        writing = self.stager.map.in_flight_pages
        if writing is not None:
            self.pool.block(*writing)
        if pages > self.pool.free_pages and writing is not None:
            self.pool.unblock(*writing)
            self.stager.cancel_in_flight()
            writing = None
        if pages <= self.pool.free_pages:
            extents = self.pool.alloc(pages)
            self.stager.map.dirty(extents)
            self.held.append(extents)
            for first, count in extents:
                for layer in range(self.layers):
                    base = self.models[self.active].window.address + (self.region.first + layer * self.layer_chunks) * CHUNK
                    ctypes.memset(base + first * PAGE_BYTES, 0xEE, count * PAGE_BYTES)
        if writing is not None:
            self.pool.unblock(*writing)

    def free(self) -> None:
        if self.held:
            self.pool.free(self.held.pop(self.draw.randrange(len(self.held))))

    def switch(self, *, show: bool) -> None:
        source, target = self.models[self.active], self.models[self.other]
        self.stager.settle()
        plan = self.stager.map.gather_plan()
        done = self.stager.gather(target.window, show=show)
        done.event.wait()
        assert (done.path, done.d2d_bytes, done.h2d_bytes) == (plan.path, plan.d2d_bytes, plan.h2d_bytes)
        assert done.d2d_bytes + done.h2d_bytes == len(target.weights)
        assert done.shown_bytes == (done.d2d_bytes if show else done.shown_bytes)
        self.arena.hide(source.window)
        assert read(target.window.address, len(target.weights)) == target.weights
        self.active = self.other
        self._begin()

    def close(self) -> None:
        self.stream.close()
        self.arena.close()
        for model in self.models.values():
            unmap(model.image.address, model.image.nbytes)


def play(seed: int) -> tuple[set[str], int]:
    """Random steps of staging, allocations and switches; the paths that switches took, and the dirty bytes that they read anew."""
    draw = random.Random(seed)
    device = Device(draw, layers=draw.randrange(1, 4), layer_chunks=draw.randrange(1, 6), weight_chunks=draw.uniform(0.5, 9))
    addresses = {name: model.window.address for name, model in device.models.items()}
    paths, dirty_bytes = set(), 0
    for _ in range(300):
        action = draw.random()
        if action < 0.6:
            device.stager.step(device.pool.high_water)
            model = device.models[device.active]
            assert read(model.window.address, len(model.weights)) == model.weights, "staging wrote over the active model"
        elif action < 0.75:
            device.allocate(draw.randrange(1, 9))
        elif action < 0.96:
            device.free()
        else:
            device.stager.settle()
            paths.add(device.stager.map.gather_plan().path)
            dirty_bytes += device.stager.map.dirty_bytes
            device.switch(show=draw.random() < 0.5)
    assert {name: model.window.address for name, model in device.models.items()} == addresses
    device.close()
    return paths, dirty_bytes


def test_weights_are_whole_after_every_switch_whatever_was_allocated() -> None:
    played = [play(seed) for seed in range(12)]
    assert set.union(*(paths for paths, _ in played)) == {"d2d", "partial", "h2d"}
    assert sum(dirty_bytes for _, dirty_bytes in played) > 0


def test_a_model_that_is_staged_whole_is_switched_to_without_the_host() -> None:
    device = Device(random.Random(1), layers=4, layer_chunks=5, weight_chunks=6)
    while device.stager.step(0):
        pass
    before = device.models["a"].window.chunks
    ctypes.memset(device.models["b"].image.address, 0, device.models["b"].image.nbytes)  # nobody may look there any more
    gathered = device.stager.gather(device.models["b"].window)
    gathered.event.wait()
    assert (gathered.path, gathered.h2d_bytes, gathered.shown_bytes) == ("d2d", 0, 0)
    assert read(device.models["b"].window.address, 6 * CHUNK) == device.models["b"].weights
    assert set(device.models["b"].window.chunks[:6]).isdisjoint({before[device.region.place(chunk)] for chunk in range(6)})
    device.close()


def test_what_is_staged_can_be_shown_instead_of_copied() -> None:
    device = Device(random.Random(1), layers=4, layer_chunks=5, weight_chunks=6)
    while device.stager.step(0):
        pass
    tail = [device.models["a"].window.chunks[device.region.place(chunk)] for chunk in range(6)]
    gathered = device.stager.gather(device.models["b"].window, show=True)
    gathered.event.wait()
    assert gathered.shown_bytes == gathered.d2d_bytes == 6 * CHUNK
    assert list(device.models["b"].window.chunks[:6]) == tail
    assert read(device.models["b"].window.address, 6 * CHUNK) == device.models["b"].weights
    device.close()


def test_staging_runs_beside_whatever_else_the_process_does() -> None:
    """The chunk is in flight while its copy waits, and the allocator is told which rows to stay off."""

    class Gated(CpuStream):
        opened = threading.Event()

        def move(self, copies: Copies) -> None:
            assert self.opened.wait(60)
            super().move(copies)

    device = Device(random.Random(1))
    gated = Gated()
    stager = Stager(device.arena, device.models["a"].window, device.region, gated)
    stager.begin("b", device.models["b"].image, 0)
    assert stager.step(0)
    assert stager.map.in_flight == 0 and stager.map.clean_bytes == 0
    assert stager.map.in_flight_pages == ((device.layer_chunks - 1) * CHUNK // PAGE_BYTES, CHUNK // PAGE_BYTES)
    Gated.opened.set()
    stager.settle()
    assert stager.map.clean_bytes == CHUNK
    gated.close()
    device.close()


def test_a_chunk_whose_copy_failed_is_missing() -> None:
    class Broken(CpuStream):
        def move(self, copies: Copies) -> None:
            raise RuntimeError("no")

    device = Device(random.Random(1))
    broken = Broken()
    stager = Stager(device.arena, device.models["a"].window, device.region, broken)
    stager.begin("b", device.models["b"].image, 0)
    assert stager.step(0)
    stager.settle()
    assert stager.map.clean_bytes == 0 and stager.map.in_flight is None
    broken.close()
    device.close()


def test_a_switch_hears_of_every_copy_that_failed() -> None:
    class Shaky(CpuStream):
        copied = 0

        def move(self, copies: Copies) -> None:
            self.copied += 1
            if self.copied == 1:
                raise RuntimeError("no")
            super().move(copies)

    device, shaky = Device(random.Random(1)), Shaky()
    target = device.models["b"]
    gathered = gather(device.arena, target.window, target.image, {0: 9}, shaky)
    with pytest.raises(CopyFailed):
        gathered.event.wait()
    shaky.close()
    device.close()


def test_impossible_arenas_and_images_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of"):
        Arena(CpuMover(), 2, 100)
    device = Device(random.Random(1))
    with pytest.raises(ValueError, match="allowed multiples of 16"):
        device.stager.begin("b", Image(0, 17), 0)
    with pytest.raises(ValueError, match="once"):
        device.arena.show(device.models["a"].window, range(device.arena.count))
    device.close()
