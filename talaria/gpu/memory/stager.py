"""The next model's weights, staged into the clean tail of the active one's KV, and gathered at the switch (SPEC §5.3).

``StagingMap`` says what goes where and what is still clean; here its chunks are bytes. A window's layers follow each other behind its
weights, each of them a whole number of chunks, so that a staged chunk of weights is a chunk of the arena: it can be copied to where it
belongs, or shown there as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from talaria.gpu.memory.arena import Arena, Window
from talaria.gpu.memory.gather import Gathered, Image, Ledger, from_image, gather
from talaria.gpu.memory.mover import CopyFailed, Event, Stream
from talaria.substrate.staging import StagingMap

PADDING_BYTES: Final = 16
"""Of an image: a chunk that is begun has more to come."""


@dataclass(frozen=True)
class KvRegion:
    """The active model's KV: ``layers`` blocks of ``layer_chunks`` chunks each, from chunk ``first`` of its window on.

    A block's last page ends where the block does; what is no whole page lies before its first.
    """

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


class Stager:
    """One rank's staging while one model is active."""

    def __init__(self, arena: Arena, window: Window, region: KvRegion, stream: Stream) -> None:
        chunk_bytes = arena.chunk_bytes
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

    def step(self, high_water: int, after: Sequence[Any] = ()) -> Event | None:
        """Begin to copy one more chunk, once the last one is there, and behind ``after``. None if there is none that lacks and has room.

        Until ``settle`` the allocator must stay off ``map.in_flight_pages``.
        """
        self.settle()
        if self.map.target is None or self.map.advance(1, high_water) == 0:
            return None
        chunk = self.map.in_flight
        assert chunk is not None
        places = self._region.place(chunk) - chunk
        copies = from_image(self._image, [chunk], self._window.address, self._arena.chunk_bytes, places)
        event = self._stream.copy(copies, after)
        self._copying = (chunk, event)
        return event

    @property
    def copying_bytes(self) -> int:
        """Of the chunk that is being copied."""
        return 0 if self._copying is None else self._image.size(self._copying[0], self._arena.chunk_bytes)

    def settle(self) -> bool:
        """Wait for the chunk that is being copied; then it is clean, or missing again, and False, if its copy failed."""
        if self._copying is None:
            return True
        (chunk, event), self._copying = self._copying, None
        try:
            event.wait()
        except CopyFailed:
            self.map.cancel_in_flight()
            return False
        self.map.advance(self._image.size(chunk, self._arena.chunk_bytes) - 1)
        return True

    def cancel_in_flight(self) -> None:
        """The allocator needs the rows of the chunk that is being copied: wait, and count it as missing."""
        if self._copying is not None:
            with contextlib.suppress(CopyFailed):
                self._copying[1].wait()
            self._copying = None
        self.map.cancel_in_flight()

    # --- the switch --------------------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """What is staged clean, and in which chunks of the arena, to which nothing may be written any more.

        Raises ValueError without a target.
        """
        self.settle()
        plan = self.map.gather_plan()
        clean = [chunk for first, count in plan.clean for chunk in range(first, first + count)]
        return Ledger(plan.model, {chunk: self._window.chunks[self._region.place(chunk)] for chunk in clean}, self.map.dirty_bytes)

    def gather(self, target: Window, *, show: bool = False) -> Gathered:
        """Bring the staged model's weights behind its own window.

        The source's KV is void from here on; the source is hidden when ``event`` is over.
        """
        return gather(self._arena, target, self._image, self.ledger().staged, self._stream, show=show)
