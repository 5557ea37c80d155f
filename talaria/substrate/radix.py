"""Which pages of which prefix nodes a cache holds: the tree that the device cache and the host registry share.

A page belongs to the node that holds its last token (a path's last, partial page to its last node), so two paths share
exactly the pages that lie wholly within their common prefix. Pages are reclaimed from the tails of leaves, least
recently used first; a hold protects a path up to its end. All counts are kept, so free space is known in O(1).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from talaria.substrate.prefix import Spans

Step = tuple[Hashable, int, int]
"""(key, first page, end page): the pages of a path that one node owns."""


def page_steps(spans: Spans, page_tokens: int, *, partial: bool) -> list[tuple[int, int, int]]:
    """The pages of a path by owner, root first, as (node, first page, end page).

    ``partial`` says whether a last page that is not full counts.
    """
    steps = []
    path_end = spans[-1][2] if partial and spans else -1
    for node, start, end in spans:
        first, last = start // page_tokens, -(-end // page_tokens) if end == path_end else end // page_tokens
        if last > first:
            steps.append((node, first, last))
    return steps


class Entry:
    """The pages [first_page, end_page) of one node's path that a cache holds; none yet."""

    __slots__ = (
        "children", "end_page", "first_page", "held", "holds", "key", "last_use_s", "needed", "owner", "page_cost", "parent", "queued",
    )  # fmt: skip

    def __init__(self, key: Hashable, first_page: int, page_cost: int, parent: Entry | None) -> None:
        self.key = key
        self.first_page = self.end_page = first_page
        self.page_cost = page_cost
        self.parent = parent
        self.needed = first_page
        """End page up to which children need this node."""
        self.held = first_page
        """End page of the longest hold."""
        self.last_use_s = 0.0
        self.owner: Hashable = None
        self.children: dict[Hashable, int] = {}
        """Child → the page at which it branches off."""
        self.holds: dict[int, int] = {}
        """End page → number of holds that end there."""
        self.queued = 0
        """Number of the queue item that stands for this entry."""


E = TypeVar("E", bound=Entry)

NO_USE_S = float("-inf")
"""As a time: a hold that says nothing about use."""


class PageTree(Generic[E]):
    """Entries by key, with their holds and their order of eviction. ``cost`` units are pages or bytes."""

    def __init__(self, make: Callable[[Hashable, int, int, E | None], E]) -> None:
        self.entries: dict[Hashable, E] = {}
        self.cost = 0
        """Of all pages in the tree."""
        self.held_cost = 0
        """Of the pages under a hold; all others can be reclaimed, leaves first."""
        self._make = make
        self._queue: list[tuple[float, int, E]] = []
        self._used: dict[E, None] = {}
        """Entries used or uncovered since the queue was last needed, in order: most runs evict seldom or never."""
        self._numbered = 0

    def shortfall(self, steps: Sequence[Step], page_cost: int) -> tuple[int, int]:
        """(cost of the pages of a path that are not here, cost of those that are here without a hold)."""
        missing = idle = 0
        for key, first, end in steps:
            entry = self.entries.get(key)
            if entry is None:
                missing += (end - first) * page_cost
                continue
            here = end
            if end > entry.end_page:
                here = entry.end_page
                missing += (end - here) * entry.page_cost
            if here > entry.held:
                idle += (here - entry.held) * entry.page_cost
        return missing, idle

    def hold(self, steps: Sequence[Step], page_cost: int, now_s: float) -> list[tuple[E, int]]:
        """Hold a path, with new pages where it has none. Returns (entry, new pages) for each entry that grew."""
        entries = self.entries
        path: list[tuple[E, int, int]] = []
        grown: list[tuple[E, int]] = []
        parent: E | None = None
        before = 0
        for key, first, end in steps:
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = self._make(key, first, page_cost, parent)
                if parent is not None:
                    parent.children[key] = before
                    if before > parent.needed:
                        parent.needed = before
            if end > entry.end_page:
                grown.append((entry, end - entry.end_page))
                self.cost += (end - entry.end_page) * entry.page_cost
                entry.end_page = end
            entry.holds[end] = entry.holds.get(end, 0) + 1
            if end > entry.held:
                self.held_cost += (end - entry.held) * entry.page_cost
                entry.held = end
            path.append((entry, first, end))
            parent, before = entry, end
        self._use(path, now_s)
        return grown

    def unhold(self, steps: Sequence[Step], now_s: float) -> list[tuple[E, int, int]]:
        """Undo one ``hold`` of the same path, used until ``now_s``. Returns the path with entries in place of keys.

        Raises ValueError without a matching hold.
        """
        path: list[tuple[E, int, int]] = []
        entries = self.entries
        for key, first, end in steps:
            found = entries.get(key)
            if found is None or end not in found.holds:
                raise ValueError(f"no hold of {key!r} ends at page {end}")
            path.append((found, first, end))
        for entry, _, end in path:
            self._let_go(entry, end)
        self._use(path, now_s)
        return path

    def prolong(self, steps: Sequence[Step], end_page: int, now_s: float) -> int:
        """``hold`` the path of ``steps`` up to ``end_page`` of its last entry, then ``unhold`` it as it was; new pages.

        Raises ValueError without a matching hold.
        """
        entries = self.entries
        path = [(entries[key], first, end) for key, first, end in steps if key in entries]
        if len(path) < len(steps) or steps[-1][2] not in path[-1][0].holds:
            raise ValueError(f"no hold of {steps[-1][0]!r} ends at page {steps[-1][2]}")
        last, first, before = path[-1]
        path[-1] = (last, first, end_page)
        new_pages = end_page - last.end_page
        if new_pages > 0:
            self.cost += new_pages * last.page_cost
            last.end_page = end_page
        last.holds[end_page] = last.holds.get(end_page, 0) + 1
        if end_page > last.held:
            self.held_cost += (end_page - last.held) * last.page_cost
            last.held = end_page
        self._let_go(last, before)
        self._use(path, now_s)
        return new_pages

    def _let_go(self, entry: E, end: int) -> None:
        """One hold that ends at ``end`` is over."""
        count = entry.holds[end] - 1
        if count:
            entry.holds[end] = count
        else:
            del entry.holds[end]
            if end == entry.held:
                entry.held = max(entry.holds) if entry.holds else entry.first_page
                self.held_cost -= (end - entry.held) * entry.page_cost

    def touch(self, steps: Iterable[Step], now_s: float) -> None:
        """Count a path as used at ``now_s`` where it is present."""
        entries = self.entries
        self._use([(entries[key], first, end) for key, first, end in steps if key in entries], now_s)

    def _use(self, path: Iterable[tuple[E, int, int]], now_s: float) -> None:
        """Note the use of a path, and queue what has a tail to reclaim behind all others that are as old."""
        used = self._used
        for entry, _, end in path:
            # A path that leaves a node midway says nothing about the node's tail beyond it.
            if (end >= entry.end_page or not entry.children) and now_s > entry.last_use_s:
                entry.last_use_s = now_s
            if entry.end_page > entry.held:
                used.pop(entry, None)
                used[entry] = None

    def trim(self, entry: E, end_page: int) -> int:
        """Cut an entry's tail down to ``end_page``, or to what holds and children need; returns its new end page.

        An entry without pages leaves the tree.
        """
        if end_page < entry.held:
            end_page = entry.held
        if end_page < entry.needed:
            end_page = entry.needed
        if end_page >= entry.end_page:
            return entry.end_page
        self.cost -= (entry.end_page - end_page) * entry.page_cost
        entry.end_page = end_page
        if end_page == entry.first_page:
            self._leave(entry)
        return end_page

    def _leave(self, entry: E) -> None:
        del self.entries[entry.key]
        self._used.pop(entry, None)
        entry.queued = 0
        parent = entry.parent
        if parent is None:
            return
        branch = parent.children.pop(entry.key)
        if branch == parent.needed:
            parent.needed = max(parent.children.values(), default=parent.first_page)
        above = self.entries[parent.key]
        above.last_use_s = max(above.last_use_s, entry.last_use_s)
        self._used.pop(above, None)
        self._used[above] = None

    def reclaim(self, cost: int, spared: Collection[Hashable] = ()) -> list[tuple[E, int]]:
        """Cut at least ``cost`` from idle tails, least recently used first, page by page.

        Entries of the owners in ``spared`` go only if nothing else is left. Returns (entry, pages cut) in order of
        the first cut; the caller has made sure that ``self.cost - self.held_cost >= cost``.
        """
        cut: dict[E, int] = {}
        passed: list[E] = []
        while cost > 0:
            for entry in self._used:
                self._enqueue(entry)
            self._used.clear()
            if not self._queue:
                spared, waiting = (), passed
                passed = []
                for entry in waiting:
                    self._enqueue(entry)
            _, number, entry = self._queue[0]
            floor = max(entry.held, entry.needed)
            if entry.queued != number or entry.end_page <= floor:
                heapq.heappop(self._queue)
                continue
            if entry.owner is not None and entry.owner in spared:
                heapq.heappop(self._queue)
                passed.append(entry)
                continue
            before = entry.end_page
            self.trim(entry, max(floor, before - -(-cost // entry.page_cost)))
            cost -= (before - entry.end_page) * entry.page_cost
            cut[entry] = cut.get(entry, 0) + before - entry.end_page
        for entry in passed:
            self._enqueue(entry)
        return list(cut.items())

    def clear(self) -> list[E]:
        """Take everything out, held or not; returns what was there, parents before children."""
        entries = list(self.entries.values())
        self.entries.clear()
        self._queue.clear()
        self._used.clear()
        self.cost = self.held_cost = 0
        return entries

    def _enqueue(self, entry: E) -> None:
        if entry.end_page <= entry.held or entry.end_page <= entry.needed:
            return
        self._numbered += 1
        entry.queued = self._numbered
        heapq.heappush(self._queue, (entry.last_use_s, self._numbered, entry))
        if len(self._queue) > 64 + 4 * len(self.entries):
            self._queue = [item for item in self._queue if item[2].queued == item[1]]
            heapq.heapify(self._queue)
