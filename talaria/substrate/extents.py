"""Ranges of page, chunk or token-page numbers as sorted, disjoint, coalesced extents.

Everything in ``substrate`` counts in extents, so that a long prompt or a large model costs a few operations and not
one per page or chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

Extent = tuple[int, int]
"""(first, count): ``count`` consecutive numbers from ``first`` on."""


class ExtentSet:
    """A set of non-negative integers, held as sorted disjoint extents; neighbours are merged."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self, *extents: Extent) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        """How many numbers are in the set."""
        for first, count in extents:
            self.add(first, count)

    def __iter__(self) -> Iterator[Extent]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield start, end - start

    def __len__(self) -> int:
        """Number of extents (``total`` counts their members)."""
        return len(self._starts)

    @property
    def end(self) -> int:
        """One past the largest member; 0 if there is none."""
        return self._ends[-1] if self._ends else 0

    def add(self, first: int, count: int) -> None:
        """Add a range that is disjoint from the set. Raises ValueError if any of it is a member already."""
        if count <= 0:
            return
        starts, ends, end = self._starts, self._ends, first + count
        if not ends or first > ends[-1]:
            starts.append(first)
            ends.append(end)
            self.total += count
            return
        if first == ends[-1]:
            ends[-1] = end
            self.total += count
            return
        at, size = bisect_right(starts, first), len(starts)
        if (at and ends[at - 1] > first) or (at < size and starts[at] < end):
            raise ValueError(f"[{first}, {end}) overlaps what the set already holds")
        joins_left = at > 0 and ends[at - 1] == first
        joins_right = at < size and starts[at] == end
        if joins_left and joins_right:
            ends[at - 1] = ends[at]
            del starts[at], ends[at]
        elif joins_left:
            ends[at - 1] = end
        elif joins_right:
            starts[at] = first
        else:
            starts.insert(at, first)
            ends.insert(at, end)
        self.total += count

    def remove(self, first: int, count: int) -> None:
        """Remove a range. Raises ValueError unless all of it is a member; nothing has changed then."""
        if count <= 0:
            return
        starts, ends, end = self._starts, self._ends, first + count
        at = bisect_right(starts, first) - 1
        if at < 0 or ends[at] < end:
            raise ValueError(f"[{first}, {end}) is not wholly in the set")
        start, stop = starts[at], ends[at]
        if start == first and stop == end:
            del starts[at], ends[at]
        elif start == first:
            starts[at] = end
        else:
            ends[at] = first
            if stop > end:
                starts.insert(at + 1, end)
                ends.insert(at + 1, stop)
        self.total -= count

    def take_lowest(self, count: int) -> list[Extent]:
        """Remove and return the ``count`` smallest members, in order. Raises ValueError if there are fewer."""
        if count > self.total:
            raise ValueError(f"{count} asked for, {self.total} in the set")
        starts, ends, taken, used, left = self._starts, self._ends, [], 0, count
        while left > 0:
            start, size = starts[used], ends[used] - starts[used]
            if size > left:
                taken.append((start, left))
                starts[used] = start + left
                break
            taken.append((start, size))
            left -= size
            used += 1
        if used:
            del starts[:used], ends[:used]
        self.total -= count
        return taken

    def take_range(self, first: int, end: int) -> list[Extent]:
        """Remove and return the members within [first, end), in order."""
        if not self.total:
            return []
        taken = self.within(first, end)
        for start, count in taken:
            self.remove(start, count)
        return taken

    def within(self, first: int, end: int) -> list[Extent]:
        """The members within [first, end), as extents in order."""
        starts, ends, size = self._starts, self._ends, len(self._starts)
        found: list[Extent] = []
        at = bisect_right(ends, first)
        while at < size and starts[at] < end:
            low, high = starts[at], ends[at]
            if low < first:
                low = first
            if high > end:
                high = end
            if low < high:
                found.append((low, high - low))
            at += 1
        return found

    def gaps(self, first: int, end: int) -> list[Extent]:
        """What [first, end) lacks, as extents in order."""
        starts, ends, size = self._starts, self._ends, len(self._starts)
        missing: list[Extent] = []
        at = bisect_right(ends, first)
        while at < size and starts[at] < end:
            if starts[at] > first:
                missing.append((first, starts[at] - first))
            first = ends[at]
            at += 1
        if first < end:
            missing.append((first, end - first))
        return missing

    def first_gap(self, first: int, end: int) -> Extent | None:
        """The first of ``gaps``, without looking for the others."""
        at = bisect_right(self._starts, first)
        if at and self._ends[at - 1] > first:
            first = self._ends[at - 1]
        if first >= end:
            return None
        return first, (min(end, self._starts[at]) if at < len(self._starts) else end) - first

    def count_below(self, end: int) -> int:
        """How many members are less than ``end``."""
        if not self._ends or end >= self._ends[-1]:
            return self.total
        return sum(count for _, count in self.within(0, end))

    def has_below(self, end: int, count: int) -> bool:
        """Whether at least ``count`` members are less than ``end``."""
        if self._ends and self._starts[-1] <= end <= self._ends[-1]:  # the usual case: what is not below is one extent
            return self.total - (self._ends[-1] - end) >= count
        for start, stop in zip(self._starts, self._ends, strict=True):
            if count <= 0 or start >= end:
                break
            count -= min(stop, end) - start
        return count <= 0

    def run_end(self, at: int) -> int:
        """The first number from ``at`` on that is not a member (``at`` itself if it is none)."""
        index = bisect_right(self._starts, at) - 1
        return self._ends[index] if index >= 0 and self._ends[index] > at else at

    def run_start(self, at: int) -> int:
        """The smallest start of a run of members that reaches up to ``at`` (exclusive); ``at`` if there is none."""
        index = bisect_left(self._starts, at) - 1
        return self._starts[index] if index >= 0 and self._ends[index] >= at else at
