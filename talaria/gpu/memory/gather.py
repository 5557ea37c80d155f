"""The target's weights brought behind its window at a switch: staged chunks from the device, all others from its host image (SPEC §5.3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from talaria.gpu.memory.arena import Arena, Window
from talaria.gpu.memory.mover import Copies, Event, Stream


class Image(NamedTuple):
    """A model's weights on the host, as they lie in its window."""

    address: int
    nbytes: int

    def chunks(self, chunk_bytes: int) -> int:
        return -(-self.nbytes // chunk_bytes)

    def size(self, chunk: int, chunk_bytes: int) -> int:
        """Of a chunk; the last one can be short."""
        return min(chunk_bytes, self.nbytes - chunk * chunk_bytes)


class Ledger(NamedTuple):
    """What the model that was active left behind: which chunks of the arena hold weights of ``model``, and hold them as they should be."""

    model: str
    staged: dict[int, int]
    """Chunk of the weights → chunk of the arena."""
    dirty_bytes: int = 0
    """Staged once and overwritten since."""


NOTHING = Ledger("", {})


class Gathered(NamedTuple):
    d2d_bytes: int
    h2d_bytes: int
    shown_bytes: int
    """Of ``d2d_bytes``, what was not copied but shown where it belongs."""
    event: Event

    @property
    def path(self) -> str:
        return "d2d" if not self.h2d_bytes else "partial" if self.d2d_bytes else "h2d"


def gather(arena: Arena, window: Window, image: Image, staged: dict[int, int], stream: Stream, *, show: bool = False) -> Gathered:
    """Show all chunks in a window that shows none, with the weights at its low end.

    Nobody may write to the arena any more. With ``show``, staged chunks become the target's as they are, instead of being copied to others.
    """
    size = arena.chunk_bytes
    weights = image.chunks(size)
    order = _order(arena.count, weights, staged, show=show)
    arena.show(window, order)
    places = {chunk: place for place, chunk in enumerate(order)}
    copied = [(chunk, places[at]) for chunk, at in staged.items() if order[chunk] != at]
    lacking = [chunk for chunk in range(weights) if chunk not in staged]
    d2d = copies((window.address + chunk * size, window.address + place * size, image.size(chunk, size)) for chunk, place in copied)
    h2d = from_image(image, lacking, window.address, size)
    event = stream.copy(Copies(*(np.concatenate(both) for both in zip(h2d, d2d, strict=True))))  # one event, which knows if any failed
    d2d_bytes = sum(image.size(chunk, size) for chunk in staged)
    return Gathered(d2d_bytes, int(h2d.nbytes.sum()), d2d_bytes - int(d2d.nbytes.sum()), event)


def _order(count: int, weights: int, staged: dict[int, int], *, show: bool) -> list[int]:
    """Which chunk of the arena comes to each place of the target: under its weights none that is still to be read."""
    kept = set(staged.values())
    free = [chunk for chunk in range(count) if chunk not in kept]
    shown = staged if show or len(free) < weights else {}  # without room for both they are shown
    behind = [shown.get(place, -1) for place in range(weights)]
    rest = iter([*free, *sorted(kept.difference(behind))])
    return [chunk if chunk >= 0 else next(rest) for chunk in [*behind, *[-1] * (count - weights)]]


def from_image(image: Image, chunks: Iterable[int], address: int, chunk_bytes: int, places: int = 0) -> Copies:
    """Chunks of the image, each ``places`` further up in the window at ``address``."""
    return copies(
        (address + (chunk + places) * chunk_bytes, image.address + chunk * chunk_bytes, image.size(chunk, chunk_bytes)) for chunk in chunks
    )


def copies(items: Iterable[tuple[int, int, int]]) -> Copies:
    table = np.array(list(items), dtype=np.int64).reshape(-1, 3)
    return Copies(table[:, 0], table[:, 1], table[:, 2])
