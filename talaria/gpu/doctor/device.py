"""``scripts/device_check``: what moves bytes, tried on one device: addresses, host KV, staging, switches; every byte is compared.

Rates stand beside the device's own: one large copy by the same stream. Exit 1 where a byte is wrong; rates below the mark are said.
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from talaria.gpu.memory.arena import Arena, Window
from talaria.gpu.memory.cpu import CpuMover, MemoryFile, unmap
from talaria.gpu.memory.gather import Image
from talaria.gpu.memory.layout import Buffer, PageLayout
from talaria.gpu.memory.mover import Copies, Mover, Stream
from talaria.gpu.memory.slabs import SLAB_BYTES
from talaria.gpu.memory.stager import KvRegion, Stager

GIB: Final = 2**30
MARKS: Final = {"d2d": 0.8, "h2d": 0.85}
"""Shares of the device's own rates that copies should reach."""
KV_LAYERS: Final = 32
GRANULES: Final = 256
BESIDE_BYTES: Final = 64 * 1024
LEFT: Final = 0x5A
"""What a process leaves in every byte of its memory."""
LEAVES_S: Final = 120.0


@dataclass(frozen=True)
class Sizes:
    chunk_bytes: int
    weight_chunks: int
    layer_chunks: int
    page_bytes: int
    """Of one page of KV in one layer, K and V apart."""


ON_CUDA: Final = Sizes(32 * 2**20, 128, 8, 64 * 1024)
ON_CPU: Final = Sizes(64 * 1024, 24, 2, 4096)


class WrongBytes(Exception):
    """Something is not where it should be, or not what it should be."""


class Host:
    """Pinned memory of this process, as an array."""

    def __init__(self, mover: Mover, nbytes: int, seed: int | None = None) -> None:
        file = MemoryFile.make("talaria-check", nbytes)
        self.address, self.nbytes, self._mover = file.map(0, nbytes), nbytes, mover
        file.close()
        words: NDArray[np.uint64] = np.ctypeslib.as_array((ctypes.c_uint64 * (nbytes // 8)).from_address(self.address))
        self.words = words
        if seed is not None:
            np.multiply(np.arange(1, words.size + 1, dtype=np.uint64), np.uint64(0x9E3779B97F4A7C15 + 2 * seed), out=words)
        mover.pin(self.address, nbytes)

    def close(self) -> None:
        self._mover.unpin(self.address)
        unmap(self.address, self.nbytes)


class Check:
    """One device with one arena, two models, and what was measured."""

    def __init__(self, mover: Mover, sizes: Sizes) -> None:
        self.mover, self.sizes = mover, sizes
        self.stream: Stream = mover.stream()
        count = 2 * sizes.weight_chunks + KV_LAYERS * sizes.layer_chunks
        self.arena = Arena(mover, count, sizes.chunk_bytes)
        self.weight_bytes = sizes.weight_chunks * sizes.chunk_bytes
        self.images = [Host(mover, self.weight_bytes, seed) for seed in (1, 2)]
        self.windows = [self.arena.window() for _ in range(2)]
        self.scratch = Host(mover, self.weight_bytes)
        self.peaks: dict[str, float] = {}
        self.lines: list[str] = []
        self.short: list[str] = []

    def close(self) -> None:
        self.stream.close()
        self.arena.close()
        for host in (*self.images, self.scratch):
            host.close()

    def timed(self, work: Callable[[], int]) -> tuple[int, float]:
        """Bytes and seconds of work that waits for its own end."""
        began_s = time.perf_counter()
        nbytes = work()
        return nbytes, time.perf_counter() - began_s

    def tell(self, what: str, nbytes: int, seconds: float, peak: str = "") -> None:
        rate = nbytes / seconds / 1e9
        line = f"{what:<44} {nbytes / 2**20:10.1f} MiB {seconds * 1e3:10.2f} ms {rate:8.2f} GB/s"
        if peak in self.peaks:
            share = rate / self.peaks[peak]
            line += f"  {share:6.1%} of {peak} peak"
            if share < MARKS.get(peak, 0.0):
                self.short.append(f"{what}: {share:.0%} of the {peak} peak, the mark is {MARKS[peak]:.0%}")
        self.lines.append(line)

    def copy(self, to: int, source: int, nbytes: int) -> int:
        one = Copies(*(np.array([value], dtype=np.int64) for value in (to, source, nbytes)))
        self.stream.copy(one).wait()
        return nbytes

    def compare(self, what: str, address: int, expected: NDArray[np.uint64]) -> None:
        """Raises WrongBytes unless the device has ``expected`` at ``address``."""
        self.scratch.words[:] = 0
        self.copy(self.scratch.address, address, expected.nbytes)
        if not np.array_equal(self.scratch.words[: expected.size], expected):
            wrong = int((self.scratch.words[: expected.size] != expected).argmax()) * 8
            raise WrongBytes(f"{what}: byte {wrong} of {expected.nbytes} is wrong")

    # --- what is checked -------------------------------------------------------------------------------------------

    def peak(self) -> None:
        """The rates of one large copy each way; the second time, when everything is mapped and warm."""
        self.arena.show(self.windows[0], range(self.arena.count))
        device, image = self.windows[0].address, self.images[0]
        ways = {
            "h2d": (device, image.address), "d2h": (self.scratch.address, device), "d2d": (device + self.weight_bytes, device),
        }  # fmt: skip
        for name, (to, source) in ways.items():
            for _ in range(2):
                nbytes, seconds = self.timed(lambda to=to, source=source: self.copy(to, source, self.weight_bytes))  # type: ignore[misc]
            self.peaks[name] = nbytes / seconds / 1e9
            self.tell(f"peak {name}", nbytes, seconds)
        self.compare("weights", device, image.words)

    def addresses(self) -> None:
        """A parked model's window is empty and stays where it is; the same chunks come back with the same bytes."""
        window = self.windows[0]
        address, order = window.address, window.chunks
        nbytes, seconds = self.timed(lambda: self._hide(window))
        self.lines.append(f"{'unmap a window':<44} {nbytes / 2**20:10.1f} MiB {seconds * 1e3:10.2f} ms")
        nbytes, seconds = self.timed(lambda: self._show(window, order))
        self.lines.append(f"{'map a window':<44} {nbytes / 2**20:10.1f} MiB {seconds * 1e3:10.2f} ms")
        if window.address != address:
            raise WrongBytes("the window has moved")
        self.compare("weights after parking", window.address, self.images[0].words)

    def granules(self) -> None:
        """What mapping costs by the piece, in the smallest pieces there are, beside copying as much."""
        size = self.mover.granule_bytes
        arena = Arena(self.mover, GRANULES, size)
        window = arena.window()
        nbytes = GRANULES * size
        began_s = time.perf_counter()
        arena.show(window, range(GRANULES))
        mapped_s = time.perf_counter() - began_s
        for _ in range(2):  # warm the second time
            _, copied_s = self.timed(lambda: self.copy(window.address, window.address + nbytes // 2, nbytes // 2))
        began_s = time.perf_counter()
        arena.hide(window)
        unmapped_s = time.perf_counter() - began_s
        arena.close()
        what = f"pieces of {size // 1024} KiB"
        self.lines.append(
            f"{what:<44} map {mapped_s / GRANULES * 1e6:.1f} µs, unmap {unmapped_s / GRANULES * 1e6:.1f} µs, "
            f"copy {2 * copied_s / GRANULES * 1e6:.1f} µs each"
        )

    def inheritance(self, *, on_cpu: bool) -> None:
        """What another process has made and filled is there, as it was, once that process has ended."""
        size, here, there = self.sizes.chunk_bytes, *socket.socketpair()
        with here, there:
            call = f"leave({there.fileno()}, {size}, on_cpu={on_cpu})"
            command = [sys.executable, "-c", f"from talaria.gpu.doctor.device import leave; {call}"]
            with subprocess.Popen(command, pass_fds=[there.fileno()]) as maker:
                there.close()
                here.settimeout(LEAVES_S)
                try:
                    _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
                except TimeoutError:
                    maker.kill()
            if maker.returncode or not descriptors:  # it was killed, or ended by itself
                raise WrongBytes("a process could not leave memory to another")
        arena = Arena(self.mover, 1, size, descriptors)
        window = arena.window()
        arena.show(window, [0])
        self.compare("what a process left", window.address, np.full(size // 8, LEFT * 0x0101010101010101, dtype=np.uint64))
        arena.close()
        self.lines.append("memory outlives the process that made it")

    def registrations(self) -> None:
        """The same host memory made known to the device in two mappings, as by two engines, and what goes on beside it."""
        file = MemoryFile.make("talaria-check", self.weight_bytes)
        addresses = [file.map(0, self.weight_bytes) for _ in range(2)]
        file.close()
        for what, address in zip(("register host memory", "register it in another mapping"), addresses, strict=True):
            slowest_s, began_s = 0.0, time.perf_counter()
            with ThreadPoolExecutor(1) as beside:
                pinned = beside.submit(self.mover.pin, address, self.weight_bytes)
                while not pinned.done():
                    _, copied_s = self.timed(lambda: self.copy(self.scratch.address, self.windows[0].address, BESIDE_BYTES))
                    slowest_s = max(slowest_s, copied_s)
                pinned.result()
            self.tell(what, self.weight_bytes, time.perf_counter() - began_s)
            self.lines.append(f"{'  the slowest small copy beside it':<44} {'':14} {slowest_s * 1e3:10.2f} ms")
        for address in addresses:
            self.mover.unpin(address)
            unmap(address, self.weight_bytes)

    def _hide(self, window: Window) -> int:
        self.arena.hide(window)
        return window.nbytes

    def _show(self, window: Window, order: tuple[int, ...]) -> int:
        self.arena.show(window, order)
        return window.nbytes

    def host_kv(self) -> None:
        """Pages are copied to the pool's slabs and, layer by layer, from there over other pages of the device, which then hold the same."""
        sizes, base = self.sizes, self.windows[0].address + self.weight_bytes
        block = sizes.layer_chunks * sizes.chunk_bytes
        half = block // 2
        buffers = [Buffer(layer, base + layer * block + part * half, sizes.page_bytes) for layer in range(KV_LAYERS) for part in (0, 1)]
        pages = half // sizes.page_bytes // 2
        pool = Host(self.mover, pages * -(-2 * KV_LAYERS * sizes.page_bytes // SLAB_BYTES) * SLAB_BYTES)
        layout = PageLayout(buffers, SLAB_BYTES, pool.address)
        for layer in range(2 * KV_LAYERS):
            self.copy(base + layer * half, self.images[layer % 2].address + layer * 4096 % (self.weight_bytes - half), half)
        numbers = list(range(pages))
        slabs = np.random.default_rng(1).permutation(pages * layout.page_slabs)
        for _ in range(2):
            nbytes, seconds = self.timed(lambda: self._save(layout, numbers, slabs))
        self.tell("checkpoint KV", nbytes, seconds, "d2h")
        others = [pages + number for number in numbers]
        for _ in range(2):
            nbytes, seconds = self.timed(lambda: self._restore(layout, others, slabs))
        self.tell("restore KV, layer by layer", nbytes, seconds, "h2d")
        size = pages * sizes.page_bytes
        for layer in range(2 * KV_LAYERS):
            first = base + layer * half
            self.copy(self.scratch.address, first, size)
            expected = self.scratch.words[: size // 8].copy()
            self.compare(f"KV of buffer {layer}", first + size, expected)
        pool.close()

    def _save(self, layout: PageLayout, pages: list[int], slabs: NDArray[np.int64]) -> int:
        copies = layout.to_pool(pages, slabs.tolist())
        self.stream.copy(copies).wait()
        return int(copies.nbytes.sum())

    def _restore(self, layout: PageLayout, pages: list[int], slabs: NDArray[np.int64]) -> int:
        layers = [layout.to_device(pages, slabs.tolist(), layer) for layer in range(layout.layers)]
        events = [self.stream.copy(layer) for layer in layers]
        for event in events:
            event.wait()
        return int(sum(layer.nbytes.sum() for layer in layers))

    def switches(self) -> None:
        """There and back: staged whole and copied, staged whole and shown, half staged, and not staged."""
        ways = (("staged, copied", 1.0, False), ("staged, shown", 1.0, True), ("half staged", 0.5, False), ("not staged", 0.0, False))
        active = 0
        for what, share, show in ways:
            active = self._switch(active, what, share, show=show)

    def _switch(self, active: int, what: str, share: float, *, show: bool) -> int:
        sizes, source, target = self.sizes, self.windows[active], self.windows[1 - active]
        region = KvRegion(sizes.weight_chunks, KV_LAYERS, sizes.layer_chunks, sizes.page_bytes)
        stager = Stager(self.arena, source, region, self.stream)
        image = self.images[1 - active]
        stager.begin("next", Image(image.address, image.nbytes), 0)
        nbytes, seconds = self.timed(lambda: self._stage(stager, int(share * sizes.weight_chunks)))
        if nbytes:
            self.tell(f"stage, chunk by chunk ({what})", nbytes, seconds, "h2d")
        self.compare("the active model's weights", source.address, self.images[active].words)
        began_s = time.perf_counter()
        gathered = stager.gather(target, show=show)
        mapped_s = time.perf_counter()
        gathered.event.wait()
        ended_s = time.perf_counter()
        self.arena.hide(source)
        moved = gathered.d2d_bytes - gathered.shown_bytes + gathered.h2d_bytes
        peak = "h2d" if not gathered.d2d_bytes else "" if gathered.h2d_bytes else "d2d"
        self.lines.append(f"{f'switch, {what}: map':<44} {target.nbytes / 2**20:10.1f} MiB {(mapped_s - began_s) * 1e3:10.2f} ms")
        if moved:
            self.tell(f"switch, {what}: {gathered.path}", moved, ended_s - mapped_s, peak)
        if gathered.d2d_bytes + gathered.h2d_bytes != self.weight_bytes:
            raise WrongBytes(f"switch, {what}: {gathered.d2d_bytes} + {gathered.h2d_bytes} bytes")
        self.compare(f"weights after the switch, {what}", target.address, image.words)
        return 1 - active

    @staticmethod
    def _stage(stager: Stager, chunks: int) -> int:
        for _ in range(chunks):
            stager.step(0)
        stager.settle()
        return stager.map.clean_bytes


def leave(channel: int, nbytes: int, *, on_cpu: bool) -> None:
    """Run by another process: memory full of ``LEFT``, to whoever is at the other end of the socket."""
    mover = CpuMover() if on_cpu else _cuda()[1]
    arena = Arena(mover, 1, nbytes)
    window = arena.window()
    arena.show(window, [0])
    mover.fill(window.address, nbytes, LEFT)
    with socket.socket(fileno=channel) as there:
        socket.send_fds(there, [b"."], list(arena.export()))


def check_graphs(check: Check) -> None:
    """A captured CUDA graph that reads a window replays with what lies behind it after parking (SPEC §5.1)."""
    import torch

    window = check.windows[0]

    class Shown:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (check.weight_bytes // 4,), "typestr": "<i4", "data": (window.address, False), "version": 3,
        }  # fmt: skip

    weights, out = torch.as_tensor(Shown(), device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    out.copy_(weights.sum())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(weights.sum())
    graph.replay()
    torch.cuda.synchronize()
    before, order = int(out), window.chunks
    check.arena.hide(window)
    check.arena.show(window, order)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    if int(out) != before:
        raise WrongBytes("a CUDA graph does not see the window's bytes after parking")
    check.lines.append("a CUDA graph captured before parking replays after it")


def main() -> int:
    parser = argparse.ArgumentParser(prog="device_check", description="Moves bytes on one device and compares every one of them.")
    parser.add_argument("--cpu", action="store_true", help="without a device: memory files and threads in its place")
    on_cpu = parser.parse_args().cpu
    try:
        name, mover = ("CPU", CpuMover()) if on_cpu else _cuda()
    except ImportError as error:
        print(f"device_check: {error}: install torch with CUDA and cuda-python, or give --cpu", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"device_check: no CUDA device: {error}; give --cpu to try without", file=sys.stderr)
        return 2
    check = Check(mover, ON_CPU if on_cpu else ON_CUDA)
    try:
        check.peak()
        check.addresses()
        check.granules()
        check.inheritance(on_cpu=on_cpu)
        if not on_cpu:
            check_graphs(check)
            check.registrations()
        check.host_kv()
        check.switches()
    except WrongBytes as error:
        print(f"device_check: {error}", file=sys.stderr)
        return 1
    finally:
        print(f"device: {name}", *check.lines, sep="\n")
        check.close()
    print("all bytes are right", *([] if on_cpu else check.short), sep="\n")
    return 0


def _cuda() -> tuple[str, Mover]:
    """Raises ImportError, RuntimeError."""
    import torch

    from talaria.gpu.memory.cuda import CudaMover

    torch.zeros(1, device="cuda")  # makes the device's context current
    return torch.cuda.get_device_name(), CudaMover()


if __name__ == "__main__":
    sys.exit(main())
