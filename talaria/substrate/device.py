"""The KV of the active model that is resident on one rank: what matches, what is locked, what goes first.

Ranks are symmetric, so one cache stands for all of them. Idle prefixes stay until their pages are needed.
"""

from __future__ import annotations

from collections.abc import Hashable

from talaria.substrate.pages import Extent, PagePool
from talaria.substrate.prefix import PrefixForest, Spans
from talaria.substrate.radix import Entry, PageTree, page_steps


class _Resident(Entry):
    __slots__ = ("extents", "node")

    def __init__(self, key: Hashable, first_page: int, page_cost: int, parent: Entry | None) -> None:
        super().__init__(key, first_page, page_cost, parent)
        assert isinstance(key, int)
        self.node = key
        """The prefix node."""
        self.extents: list[Extent] = []
        """Where the pages are, in the order of the path."""


class DeviceCache:
    """A radix over prefix nodes whose pages come from ``pool``. With ``forest``, nodes that it holds stay known there.

    Paths are given as ``spans`` (``PrefixForest.spans``). Locks nest: any number of calls may hold any paths.
    """

    def __init__(self, pool: PagePool, page_tokens: int, forest: PrefixForest | None = None) -> None:
        if page_tokens <= 0:
            raise ValueError(f"page_tokens={page_tokens}: allowed 1 or more")
        self.pool = pool
        self.page_tokens = page_tokens
        self.evicted_pages = 0
        """Idle pages that had to make room, since the start."""
        self._forest = forest
        self._tree: PageTree[_Resident] = PageTree(_Resident)
        self._new: list[Extent] = []

    @property
    def resident_tokens(self) -> int:
        """Token slots that hold KV, locked or idle."""
        return self._tree.cost * self.page_tokens

    @property
    def locked_pages(self) -> int:
        return self._tree.held_cost

    def free_tokens(self) -> int:
        """Token slots that could be allocated now, evicting every idle prefix."""
        return (self.pool.free_pages + self._tree.cost - self._tree.held_cost) * self.page_tokens

    def pages(self, node: int) -> tuple[Extent, ...]:
        """The physical pages of one node, in the order of the path."""
        entry = self._tree.entries.get(node)
        return tuple(entry.extents) if entry else ()

    def match(self, spans: Spans) -> int:
        """Tokens of the path that are resident from its start on, a multiple of the page."""
        page_tokens = self.page_tokens
        entries = self._tree.entries
        # A resident node implies its resident ancestors, so the deepest one decides.
        for node, start, end in reversed(spans):
            entry = entries.get(node)
            if entry is not None:
                pages = end // page_tokens
                if pages > entry.end_page:
                    pages = entry.end_page
                if pages > start // page_tokens:
                    return pages * page_tokens
        return 0

    def lock(self, spans: Spans, now_s: float, *, held: Spans = ()) -> bool:
        """Lock the whole path, in place of an earlier lock of ``held``, with which it begins.

        Allocates what is not resident and evicts idle leaves as needed. False, with nothing changed, if even evicting
        everything idle would not make room.
        """
        tree, pool = self._tree, self.pool
        old = page_steps(held, self.page_tokens, partial=True) if held else []
        new = page_steps(spans, self.page_tokens, partial=True)
        if old == new:
            tree.touch(old, now_s)
            return True
        lacking = 0
        if new and new[-1][2] > pool.free_pages:  # else there is room even if nothing of the path is here
            missing, idle = tree.shortfall(new, 1)
            lacking = missing - pool.free_pages
            if lacking > 0 and lacking > tree.cost - tree.held_cost - idle:
                return False
        if lacking <= 0 and old and _only_grows(old, new):
            pages = tree.prolong(old, new[-1][2], now_s)
            if pages > 0:
                self._place(tree.entries[new[-1][0]], pages)
            return True
        grown = tree.hold(new, 1, now_s)
        if lacking > 0:
            self._evict(lacking)
        for entry, pages in grown:
            self._place(entry, pages)
        if old:
            tree.unhold(old, now_s)
        return True

    def release(self, spans: Spans, keep_tokens: int, now_s: float) -> None:
        """Undo one ``lock``; full pages up to ``keep_tokens`` stay as idle cache, the rest is freed at once.

        Pages that another lock or another path needs stay. Raises ValueError without a matching lock.
        """
        steps = page_steps(spans, self.page_tokens, partial=True)
        keep = keep_tokens // self.page_tokens
        path = self._tree.unhold(steps, now_s)
        for entry, first, end in reversed(path):
            if keep >= end:
                return
            before = entry.end_page
            if before <= end:  # what lies beyond is somebody else's
                self._free(entry, before - self._tree.trim(entry, keep if keep > first else first))

    def clear(self) -> None:
        """Free everything: the region is released at a switch. Raises ValueError while anything is locked."""
        if self._tree.held_cost:
            raise ValueError(f"{self._tree.held_cost} pages are locked: release them before the region")
        entries = self._tree.clear()
        self.pool.free_all()
        if self._forest is not None:
            for entry in entries:
                self._forest.release(entry.node)

    def take_new_extents(self) -> list[Extent]:
        """Pages allocated since this was last asked: staged chunks that they overlap are dirty (SPEC §5.3)."""
        taken, self._new = self._new, []
        return taken

    def _place(self, entry: _Resident, pages: int) -> None:
        extents = self.pool.alloc(pages)
        self._new += extents
        if not entry.extents:
            entry.extents = extents.copy()
            if self._forest is not None:
                self._forest.retain(entry.node)
            return
        last, count = entry.extents[-1]
        if last + count == extents[0][0]:
            entry.extents[-1] = (last, count + extents[0][1])
            entry.extents += extents[1:]
        else:
            entry.extents += extents

    def _evict(self, pages: int) -> None:
        for entry, count in self._tree.reclaim(pages):
            self.evicted_pages += count
            self._free(entry, count)

    def _free(self, entry: _Resident, pages: int) -> None:
        """Return the last ``pages`` of an entry's extents to the pool."""
        if pages <= 0:
            return
        freed, left = [], pages
        while left > 0:
            first, count = entry.extents.pop()
            if count > left:
                entry.extents.append((first, count - left))
                first, count = first + count - left, left
            freed.append((first, count))
            left -= count
        self.pool.free(freed)
        if not entry.extents and self._forest is not None:
            self._forest.release(entry.node)


def _only_grows(old: list[tuple[int, int, int]], new: list[tuple[int, int, int]]) -> bool:
    """Whether ``new`` is the path ``old``, longer by pages of its last node."""
    return len(old) == len(new) and old[-1][0] == new[-1][0] and old[-1][2] < new[-1][2] and old[:-1] == new[:-1]
