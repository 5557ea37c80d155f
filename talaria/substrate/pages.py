"""The physical KV pages of one rank: low addresses first, so that the high-address tail stays clean for staging.

Free pages are kept as extents. Ranges that an active H2D write occupies can be blocked: an allocation skips them
(SPEC §5.3).
"""

from __future__ import annotations

from collections.abc import Iterable

from talaria.substrate.extents import Extent as Extent
from talaria.substrate.extents import ExtentSet


class OutOfPages(ValueError):
    """Fewer pages are free than were asked for."""


class PagePool:
    """``total_pages`` pages, each free, used or blocked."""

    __slots__ = ("_blocked", "_free", "free_pages", "total")

    def __init__(self, total_pages: int) -> None:
        if total_pages < 0:
            raise ValueError(f"total_pages={total_pages}: allowed 0 or more")
        self.total = total_pages
        self.free_pages = total_pages
        """Pages that an allocation can take now; blocked ones are not among them."""
        self._free = ExtentSet((0, total_pages))
        self._blocked = ExtentSet()

    @property
    def used(self) -> int:
        return self.total - self.free_pages - self._blocked.total

    @property
    def high_water(self) -> int:
        """One past the highest page in use now; from here on the region is clean."""
        if not self._blocked.total:
            return self._free.run_start(self.total)
        top = self.total
        while True:
            lower = self._blocked.run_start(self._free.run_start(top))
            if lower == top:
                return top
            top = lower

    def free_extents(self) -> list[Extent]:
        """Where ``free_pages`` are, in order."""
        return list(self._free)

    def stays_below(self, page: int, pages: int) -> bool:
        """Whether an allocation of ``pages`` is possible now and would take none from ``page`` on."""
        return self._free.has_below(page, pages)

    def alloc(self, pages: int) -> list[Extent]:
        """The ``pages`` lowest free pages, as extents in order (SPEC §5.3).

        Raises OutOfPages, with nothing changed, if fewer are free; ValueError if ``pages`` is negative.
        """
        if pages < 0:
            raise ValueError(f"pages={pages}: allowed 0 or more")
        if pages > self.free_pages:
            raise OutOfPages(f"{pages} pages asked for, {self.free_pages} of {self.total} free")
        taken = self._free.take_lowest(pages)
        self.free_pages = self._free.total
        return taken

    def free(self, extents: Iterable[Extent]) -> None:
        """Give used pages back. Raises ValueError for a page that is not in use."""
        for first, count in extents:
            end = first + count
            if first < 0 or end > self.total or (self._blocked.total and self._blocked.within(first, end)):
                raise ValueError(f"[{first}, {end}) is not in use")
            self._free.add(first, count)
            self.free_pages = self._free.total

    def free_all(self) -> None:
        """Give every used page back."""
        self._free = ExtentSet(*self._blocked.gaps(0, self.total))
        self.free_pages = self._free.total

    def block(self, first: int, count: int) -> None:
        """Keep allocations off free pages while an H2D write fills them. Raises ValueError if one is not free."""
        self._free.remove(first, count)
        self._blocked.add(first, count)
        self.free_pages = self._free.total

    def unblock(self, first: int, count: int) -> None:
        """Undo ``block``. Raises ValueError if a page is not blocked."""
        self._blocked.remove(first, count)
        self._free.add(first, count)
        self.free_pages = self._free.total
