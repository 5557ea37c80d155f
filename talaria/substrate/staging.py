"""Weights of the next model, staged in the clean high-address tail of the active model's KV region (SPEC §5.3).

A page is a row in every layer's KV block, so chunks are numbered row by row from the highest address down: chunk i lies
in layer ``i % layers`` of chunk row ``i // layers``. States are extents of chunk numbers; a 60 GB model costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from talaria.substrate.extents import Extent, ExtentSet


class GatherPlan(NamedTuple):
    """How one rank gets the target's weights at a switch: clean chunks device to device, the rest from the host."""

    model: str
    d2d_bytes: int
    h2d_bytes: int
    clean: tuple[Extent, ...]
    """Chunks to gather, by number."""
    path: str
    """``d2d``, ``partial`` or ``h2d``."""


class StagingMap:
    """Staged chunks of one target over one KV region of ``total_pages``, on one rank (ranks are symmetric).

    ``page_bytes`` is one page in one layer. The region lasts as long as its model is active: make a new map with it.

    Copying mostly fills one gap in order. It *coasts* then: the map only keeps the byte that it has reached, and makes extents of
    that when somebody asks for more than the number of clean bytes.
    """

    def __init__(self, layers: int, chunk_bytes: int, total_pages: int, page_bytes: int) -> None:
        if layers < 1 or chunk_bytes < 1 or total_pages < 0 or page_bytes < 1:
            raise ValueError(
                f"layers={layers}, chunk_bytes={chunk_bytes}, total_pages={total_pages}, page_bytes={page_bytes}: "
                "allowed 1 or more, 1 or more, 0 or more, 1 or more"
            )
        self.layers = layers
        self.chunk_bytes = chunk_bytes
        self.page_bytes = page_bytes
        self.target: str | None = None
        self._layer_bytes = total_pages * page_bytes
        self.move_tail(total_pages)
        self._clear(None, 0)

    def move_tail(self, first_page: int) -> None:
        """The pool's high water has changed. It may be late news that it has fallen; ``dirty`` itself raises it."""
        self.tail_first_page = first_page
        """Every page from here on is free, as far as the map has been told."""
        self._tail_slots = (self._layer_bytes - first_page * self.page_bytes) // self.chunk_bytes * self.layers
        """Chunks that the free tail has room for."""
        self._tail_bytes = self._tail_slots * self.chunk_bytes

    def _clear(self, target: str | None, weight_bytes: int) -> None:
        self.target = target
        self.weight_bytes = weight_bytes
        self._chunks = -(-weight_bytes // self.chunk_bytes)
        rows = -(-self._chunks // self.layers)
        self.reach_page = max(0, self._layer_bytes - rows * self.chunk_bytes) // self.page_bytes
        """The target's chunks lie in the pages from here on, however many are staged."""
        self._clean = ExtentSet()
        self._clean_bytes = 0
        """Of the chunks in ``_clean``."""
        self.clean_bytes = 0
        """Staged and not overwritten since."""
        self._dirty = ExtentSet()
        self._in_flight: int | None = None
        self._in_flight_bytes = 0
        self._coast_chunk = self._coast_byte = self._coast_end = 0
        """Where coasting began, the byte of the weights that it has reached, and the end of the gap; 0 while it does not coast."""

    # --- copying -----------------------------------------------------------------------------------------------------

    def begin(self, model: str, weight_bytes: int, tail_first_page: int) -> None:
        """Make ``model`` the target, with nothing staged; ``tail_first_page`` is the pool's high water."""
        if weight_bytes < 1:
            raise ValueError(f"weight_bytes={weight_bytes} of {model}: allowed 1 or more")
        self._clear(model, weight_bytes)
        self.move_tail(tail_first_page)
        self._begin_coasting()

    def cancel(self) -> None:
        """Give up the target: what was staged is void."""
        self._clear(None, 0)

    def cancel_in_flight(self) -> None:
        """Give up the chunk being written, so that its pages can be allocated; it is missing again."""
        self._end_coasting()
        self._in_flight = None
        self._in_flight_bytes = 0

    def coast(self, nbytes: int) -> bool:
        """``advance``, if there is room for all of ``nbytes`` in the gap that is being filled, or nothing is missing.

        False, with nothing changed, if not: then ``advance`` has to look where there is room.
        """
        reached = self._coast_byte + nbytes
        if reached < self._coast_end and reached < self._tail_bytes:
            self._coast_byte = reached
            self.clean_bytes = self._clean_bytes + (reached // self.chunk_bytes - self._coast_chunk) * self.chunk_bytes
            return True
        return self._clean_bytes == self.weight_bytes

    def _begin_coasting(self) -> None:
        """Coast through the first gap, unless a chunk elsewhere is to be completed before."""
        gap = self._clean.first_gap(0, self._chunks)
        if gap is not None and (self._in_flight is None or self._in_flight == gap[0]):
            self._coast_chunk = gap[0]
            self._coast_byte = gap[0] * self.chunk_bytes + self._in_flight_bytes
            self._coast_end = gap[0] * self.chunk_bytes + self._bytes(*gap)
            self._in_flight, self._in_flight_bytes = None, 0

    def _end_coasting(self) -> None:
        """Enter in the books what was only counted."""
        if self._coast_end == 0:
            return
        first, (end, rest) = self._coast_chunk, divmod(self._coast_byte, self.chunk_bytes)
        self._coast_chunk = self._coast_byte = self._coast_end = 0
        if end > first:
            self._mark_clean(first, end - first)
        if rest:
            self._in_flight, self._in_flight_bytes = end, rest

    def advance(self, nbytes: int, tail_first_page: int | None = None) -> int:
        """Copy up to ``nbytes`` into the highest chunks that are not clean and lie in the free tail; bytes copied.

        A chunk that is not complete stays in flight and is continued first next time. ``tail_first_page`` is the
        pool's high water where it may have fallen; allocations raise it through ``dirty``.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: allowed 0 or more")
        if tail_first_page is not None and tail_first_page != self.tail_first_page:
            self.move_tail(tail_first_page)
        if self._clean_bytes == self.weight_bytes:
            return 0
        if self.coast(nbytes):
            return nbytes
        self._end_coasting()
        left = nbytes
        if self._in_flight is not None:
            left = self._fill(self._in_flight, left)
        limit = min(self._chunks, self._tail_slots)
        while left > 0:
            gap = self._clean.first_gap(0, limit)
            if gap is None:
                break
            first, count = gap
            whole = min(count, left // self.chunk_bytes)
            if whole and first + whole == self._chunks:
                whole -= 1  # the last chunk can be short
            if whole:
                self._mark_clean(first, whole)
                left -= whole * self.chunk_bytes
            else:
                left = self._fill(first, left)
        self._begin_coasting()
        return nbytes - left

    def _fill(self, chunk: int, nbytes: int) -> int:
        """Go on with one chunk; returns the bytes left over."""
        missing = self._bytes(chunk, 1) - self._in_flight_bytes
        if nbytes < missing:
            self._in_flight = chunk
            self._in_flight_bytes += nbytes
            return 0
        self._in_flight, self._in_flight_bytes = None, 0
        self._mark_clean(chunk, 1)
        return nbytes - missing

    def _mark_clean(self, first: int, count: int) -> None:
        self._dirty.take_range(first, first + count)
        self._clean.add(first, count)
        self._clean_bytes += self._bytes(first, count)
        self.clean_bytes = self._clean_bytes

    def _bytes(self, first: int, count: int) -> int:
        """Size of ``count`` chunks from ``first`` on; the last one of the weights can be short."""
        return min((first + count) * self.chunk_bytes, self.weight_bytes) - first * self.chunk_bytes

    @property
    def in_flight(self) -> int | None:
        """The chunk that is begun and not complete."""
        self._end_coasting()
        return self._in_flight

    @property
    def in_flight_pages(self) -> Extent | None:
        """Pages whose rows the chunk in flight occupies: the allocator must skip them."""
        self._end_coasting()
        if self._in_flight is None:
            return None
        high = self._layer_bytes - self._in_flight // self.layers * self.chunk_bytes
        first = (high - self.chunk_bytes) // self.page_bytes
        return first, -(-high // self.page_bytes) - first

    # --- allocations -------------------------------------------------------------------------------------------------

    def dirty(self, extents: Iterable[Extent]) -> None:
        """Pages were allocated: every clean chunk whose rows they overlap is dirty now.

        Raises ValueError if one belongs to the chunk in flight, which an allocator must skip.
        """
        for first, count in extents:
            end = first + count
            if end > self.tail_first_page:
                self.move_tail(end)
            if end <= self.reach_page:
                continue
            writing = self.in_flight_pages
            if writing and first < sum(writing) and writing[0] < end:
                raise ValueError(f"pages [{first}, {end}) overlap the chunk in flight")
            low_row = (self._layer_bytes - end * self.page_bytes) // self.chunk_bytes
            high_row = (self._layer_bytes - first * self.page_bytes - 1) // self.chunk_bytes
            for start, chunks in self._clean.take_range(low_row * self.layers, (high_row + 1) * self.layers):
                self._dirty.add(start, chunks)
                self._clean_bytes -= self._bytes(start, chunks)
                self.clean_bytes = self._clean_bytes

    # --- what the router and the switch see ----------------------------------------------------------------------------

    @property
    def dirty_bytes(self) -> int:
        """Staged once, overwritten by KV since, not staged again."""
        self._end_coasting()
        return sum(self._bytes(first, count) for first, count in self._dirty)

    @property
    def slack_bytes(self) -> int:
        """Bytes of the free tail that hold no clean chunk: still usable to stage weights (the router's slack)."""
        coasted = self._coast_byte // self.chunk_bytes - self._coast_chunk  # only where the tail is free
        return (self._tail_slots - self._clean.count_below(self._tail_slots) - coasted) * self.chunk_bytes

    def coverage(self) -> float:
        """Share of the target's bytes that is staged clean; 0 without a target."""
        return self.clean_bytes / self.weight_bytes if self.weight_bytes else 0.0

    def dirty_share(self) -> float:
        """Share of the target's bytes that was staged and is dirty; 0 without a target."""
        return self.dirty_bytes / self.weight_bytes if self.weight_bytes else 0.0

    def gather_plan(self) -> GatherPlan:
        """What a switch to the target moves now; its H2D bytes are the uncovered and the dirty ones, exactly.

        Raises ValueError without a target.
        """
        if self.target is None:
            raise ValueError("nothing is being staged")
        self._end_coasting()
        d2d_bytes = self._clean_bytes
        h2d_bytes = self.weight_bytes - d2d_bytes
        path = "d2d" if h2d_bytes == 0 else "partial" if d2d_bytes else "h2d"
        return GatherPlan(self.target, d2d_bytes, h2d_bytes, tuple(self._clean), path)
