"""A device's managed memory: equal chunks of physical memory, and for each model a window of addresses over all of them (SPEC §5.1).

A window never moves, so that everything that was captured for its model stays valid; only what lies behind it changes. Weights and KV grow
from a window's low end. Two windows may show the same chunk for as long as a switch takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from talaria.gpu.memory.mover import Memory, Mover


class Window:
    """``address`` to ``address`` + ``nbytes``, one place per chunk."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.chunks: tuple[int, ...] = ()
        """Which chunk lies at each place; empty while the model is parked."""


class Arena:
    """``count`` chunks of ``chunk_bytes``, a multiple of what the mover can map: new ones, or those behind ``descriptors``, which are
    taken over."""

    def __init__(self, mover: Mover, count: int, chunk_bytes: int, descriptors: Sequence[int] = ()) -> None:
        if count < 1 or chunk_bytes < 1 or chunk_bytes % mover.granule_bytes:
            raise ValueError(f"count={count}, chunk_bytes={chunk_bytes}: allowed 1 or more, a multiple of {mover.granule_bytes}")
        self.count = count
        self.chunk_bytes = chunk_bytes
        self._mover = mover
        self._windows: list[Window] = []
        self._memories: list[Memory] = []
        if descriptors:
            self._memories += [mover.adopt(descriptor, chunk_bytes) for descriptor in descriptors]
        else:
            for _ in range(count):
                self._memories.append(mover.create(chunk_bytes))

    def export(self) -> Iterator[int]:
        """New descriptors of the chunks, for other processes, each made when it is asked for: there can be as many as may be open."""
        return (memory.export() for memory in self._memories)

    def window(self) -> Window:
        """A new one, with nothing behind it. Raises OSError where addresses run out."""
        nbytes = self.count * self.chunk_bytes
        window = Window(self._mover.reserve(nbytes), nbytes)
        self._windows.append(window)
        return window

    def show(self, window: Window, order: Sequence[int]) -> None:
        """Put chunk ``order[place]`` at each place of a window that shows nothing."""
        if window.chunks or sorted(order) != list(range(self.count)):
            raise ValueError("a window shows all chunks once, or none")
        self._mover.map(window.address, [self._memories[chunk] for chunk in order])
        window.chunks = tuple(order)

    def hide(self, window: Window) -> None:
        """Take everything away from behind a window. Nothing may be using it any more."""
        if window.chunks:
            self._mover.unmap(window.address, [self._memories[chunk] for chunk in window.chunks])
        window.chunks = ()

    def close(self) -> None:
        for window in self._windows:
            self.hide(window)
            self._mover.unreserve(window.address, window.nbytes)
        for memory in self._memories:
            memory.close()
