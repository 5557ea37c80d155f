"""The next model's weights, staged into the clean tail of the active one's KV, and gathered at the switch (SPEC §5.3).

``StagingMap`` says what goes where and what is still clean; here its chunks are bytes. A window's layers follow each other behind its
weights, each of them a whole number of chunks, so that a staged chunk of weights is a chunk of the arena: it can be copied to where it
belongs, or shown there as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from talaria.gpu.memory.arena import Arena, Window
from talaria.gpu.memory.mover import Copies, CopyFailed, Event, Stream
from talaria.substrate.staging import GatherPlan, StagingMap

PADDING_BYTES: Final = 16
"""Of an image: a chunk that is begun has more to come."""


class Image(NamedTuple):
    """A model's weights on the host, as they lie in its window."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class KvRegion:
    """The active model's KV: ``layers`` blocks of ``layer_chunks`` chunks each, from chunk ``first`` of its window on."""

    first: int
    layers: int
    layer_chunks: int
    page_bytes: int
    """Of one page in one layer."""

    def pages(self, chunk_bytes: int) -> int:
        return self.layer_chunks * chunk_bytes // self.page_bytes

    def place(self, chunk: int) -> int:
        """Where in the window a staged chunk lies: the highest ones of every layer first."""
        return self.first + chunk % self.layers * self.layer_chunks + self.layer_chunks - 1 - chunk // self.layers


class Gathered(NamedTuple):
    plan: GatherPlan
    d2d_bytes: int
    h2d_bytes: int
    shown_bytes: int
    """Of ``d2d_bytes``, what was not copied but shown where it belongs."""
    event: Event


class Stager:
    """One rank's staging while one model is active. Its pages must divide a layer's block without rest."""

    def __init__(self, arena: Arena, window: Window, region: KvRegion, stream: Stream) -> None:
        chunk_bytes = arena.chunk_bytes
        if region.layer_chunks * chunk_bytes % region.page_bytes:
            raise ValueError(f"pages of {region.page_bytes} bytes in layers of {region.layer_chunks * chunk_bytes}: allowed whole pages")
        self.map = StagingMap(region.layers, chunk_bytes, region.pages(chunk_bytes), region.page_bytes)
        self._arena, self._window, self._region, self._stream = arena, window, region, stream
        self._image = Image(0, 0)
        self._copying: tuple[int, Event] | None = None

    def begin(self, model: str, image: Image, high_water: int) -> None:
        """Stage ``model`` from now on, whose image stays where it is. Raises ValueError for an image that was not padded."""
        if image.nbytes % PADDING_BYTES:
            raise ValueError(f"an image of {image.nbytes} bytes: allowed multiples of {PADDING_BYTES}")
        self.map.begin(model, image.nbytes, high_water)
        self._image = image

    def step(self, high_water: int) -> bool:
        """Begin to copy one more chunk, once the last one is there. False if there is none that lacks and has room.

        Until ``settle`` the allocator must stay off ``map.in_flight_pages``.
        """
        self.settle()
        if self.map.target is None or self.map.advance(1, high_water) == 0:
            return False
        chunk = self.map.in_flight
        assert chunk is not None
        event = self._stream.copy(self._from_image([chunk], self._window.address, self._region.place(chunk) - chunk))
        self._copying = (chunk, event)
        return True

    def settle(self) -> None:
        """Wait for the chunk that is being copied; then it is clean, or missing again if its copy failed."""
        if self._copying is None:
            return
        (chunk, event), self._copying = self._copying, None
        try:
            event.wait()
        except CopyFailed:
            self.map.cancel_in_flight()
        else:
            self.map.advance(self._size(chunk) - 1)

    def cancel_in_flight(self) -> None:
        """The allocator needs the rows of the chunk that is being copied: wait, and count it as missing."""
        if self._copying is not None:
            self._copying[1].wait()
            self._copying = None
        self.map.cancel_in_flight()

    # --- the switch --------------------------------------------------------------------------------------------------

    def gather(self, target: Window, *, show: bool = False) -> Gathered:
        """Bring the target's weights to the low end of its window: clean chunks from the device, all others from its image.

        The source's KV is void from here on; the source is hidden when ``event`` is over. With ``show``, staged chunks become the target's
        as they are, instead of being copied to others.
        """
        self.settle()
        plan, arena = self.map.gather_plan(), self._arena
        clean = [chunk for first, count in plan.clean for chunk in range(first, first + count)]
        staged = {chunk: self._window.chunks[self._region.place(chunk)] for chunk in clean}
        order = self._order(staged, show=show)
        arena.show(target, order)
        copied = [chunk for chunk in staged if order[chunk] != staged[chunk]]
        lacking = [chunk for chunk in range(self._weight_chunks) if chunk not in staged]
        d2d, h2d = self._from_tail(copied, target), self._from_image(lacking, target.address, 0)
        self._stream.copy(h2d)
        event = self._stream.copy(d2d)
        d2d_bytes = sum(self._size(chunk) for chunk in staged)
        return Gathered(plan, d2d_bytes, int(h2d.nbytes.sum()), d2d_bytes - int(d2d.nbytes.sum()), event)

    def _order(self, staged: dict[int, int], *, show: bool) -> list[int]:
        """Which chunk of the arena comes to each place of the target: under its weights none that is still to be read."""
        weights = self._weight_chunks
        kept = set(staged.values())
        free = [chunk for chunk in range(self._arena.count) if chunk not in kept]
        shown = staged if show or len(free) < weights else {}  # without room for both they are shown
        behind = [shown.get(place, -1) for place in range(weights)]
        rest = iter([*free, *sorted(kept.difference(behind))])
        return [chunk if chunk >= 0 else next(rest) for chunk in [*behind, *[-1] * (self._arena.count - weights)]]

    def _from_tail(self, chunks: Iterable[int], target: Window) -> Copies:
        size = self._arena.chunk_bytes
        return _copies(
            (target.address + chunk * size, self._window.address + self._region.place(chunk) * size, self._size(chunk)) for chunk in chunks
        )

    def _from_image(self, chunks: Iterable[int], address: int, places: int) -> Copies:
        """Chunks of the image, each ``places`` further up in the window at ``address``."""
        size = self._arena.chunk_bytes
        return _copies((address + (chunk + places) * size, self._image.address + chunk * size, self._size(chunk)) for chunk in chunks)

    @property
    def _weight_chunks(self) -> int:
        return -(-self._image.nbytes // self._arena.chunk_bytes)

    def _size(self, chunk: int) -> int:
        return min(self._arena.chunk_bytes, self._image.nbytes - chunk * self._arena.chunk_bytes)


def _copies(items: Iterable[tuple[int, int, int]]) -> Copies:
    table = np.array(list(items), dtype=np.int64).reshape(-1, 3)
    return Copies(table[:, 0], table[:, 1], table[:, 2])
