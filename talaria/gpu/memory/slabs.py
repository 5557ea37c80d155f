"""Which slabs of an instance's host pool are taken: numbers that mean the same place in every rank's partition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from talaria.substrate.extents import ExtentSet

SLAB_BYTES: Final = 256 * 1024
"""A page of a large model is a few MiB on each rank: little is lost in its last slab, and its slabs are few to name."""
Slabs = tuple[int, ...]


class SlabPool:
    """``total`` slabs of one size. A block takes any of them, so that no free slab is ever of no use."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = ExtentSet((0, total))

    @property
    def free(self) -> int:
        return self._free.total

    def take(self, count: int) -> Slabs:
        """The lowest free ones. Raises ValueError if there are fewer."""
        return tuple(number for first, size in self._free.take_lowest(count) for number in range(first, first + size))

    def give(self, slabs: Iterable[int]) -> None:
        """Raises ValueError for one that is free."""
        first, count = 0, 0
        for number in sorted(slabs):
            if number != first + count:
                self._free.add(first, count)
                first, count = number, 0
            count += 1
        self._free.add(first, count)
