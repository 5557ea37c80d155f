"""What staging leaves in KV, until the pages are given out again (SPEC §5.3).

Attention kernels read the last page of a sequence to its end, and multiply what lies behind the sequence by zero (FlashAttention 3 and
FlashInfer's MLA among them). KV of an earlier sequence is a number there; another model's weights need not be one, and then no answer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from talaria.gpu.memory.arena import Window
from talaria.gpu.memory.mover import Copies, Event, Stream
from talaria.gpu.memory.stager import KvRegion
from talaria.substrate.pages import Extent


class Soil:
    """A stream of copies of whole chunks into the KV ``region`` of one window, which knows what it has written over.

    The staging thread copies while the scheduler's takes, and never in the same row of chunks: pages that are taken were allocated before
    (``memory.tail``), and nothing is staged there until they are freed.
    """

    def __init__(self, stream: Stream, window: Window, region: KvRegion, chunk_bytes: int) -> None:
        self._stream = stream
        self._first = window.address + region.first * chunk_bytes
        self._region, self._chunk_bytes = region, chunk_bytes
        self._rest = region.layer_chunks * chunk_bytes % region.page_bytes
        """Before the first page of each block."""
        self._written: dict[int, set[int]] = {}
        """Addresses of chunks, by their number in their layer's block: its pages have their rows there in all layers."""

    def copy(self, copies: Copies, after: Sequence[Any] = ()) -> Event:
        for address in copies.to.tolist():
            self._written.setdefault((address - self._first) // self._chunk_bytes % self._region.layer_chunks, set()).add(address)
        return self._stream.copy(copies, after)

    def close(self) -> None:
        self._stream.close()

    def take(self, pages: Iterable[Extent]) -> list[int]:
        """Addresses of the soiled chunks in which these pages, free until now, have rows; they are the caller's to wipe.

        As a whole: a chunk is only staged while all its pages are free, and the first of them to be taken takes it out of here.
        """
        found: list[int] = []
        for first, count in pages:
            if not self._written:
                break
            low = (self._rest + first * self._region.page_bytes) // self._chunk_bytes
            end = -(-(self._rest + (first + count) * self._region.page_bytes) // self._chunk_bytes)
            for chunk in range(low, end):
                found += sorted(self._written.pop(chunk, ()))
        return found

    def forget(self, *, soiled: bool = False) -> None:
        """All KV is as in a new pool, or as far from it as can be."""
        size, region = self._chunk_bytes, self._region
        blocks = [self._first + layer * region.layer_chunks * size for layer in range(region.layers)] if soiled else []
        self._written = {chunk: {block + chunk * size for block in blocks} for chunk in range(region.layer_chunks if soiled else 0)}
