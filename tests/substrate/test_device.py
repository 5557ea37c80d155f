"""The device cache against one set of pages, each owned by the node that holds its last token."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.substrate.device import DeviceCache
from talaria.substrate.pages import PagePool
from talaria.substrate.prefix import PrefixForest, Spans
from tests.substrate.content import Contents

PAGE = 4
Page = tuple[int, int]
"""(node, page index within the path)"""


def path_pages(spans: Spans) -> list[Page]:
    """The pages of a path, one by one, by the rule of ownership."""
    if not spans:
        return []
    owner_of = {token: node for node, start, end in spans for token in range(start, end)}
    tokens = spans[-1][2]
    return [(owner_of[min(first + PAGE, tokens) - 1], first // PAGE) for first in range(0, tokens, PAGE)]


def line(forest: PrefixForest, tokens: int) -> Spans:
    node = forest.new_root()
    forest.extend(node, 0, tokens)
    return forest.spans(node, tokens)


def cache_of(pages: int) -> tuple[PrefixForest, DeviceCache]:
    forest = PrefixForest()
    return forest, DeviceCache(PagePool(pages), PAGE, forest)


class Oracle:
    """Resident pages as a plain set; eviction order is free, but must be minimal and from idle leaves."""

    def __init__(self, pages: int) -> None:
        self.contents = Contents()
        self.cache = DeviceCache(PagePool(pages), PAGE, self.contents.forest)
        self.total = pages
        self.resident: set[Page] = set()
        self.needs: dict[Page, set[Page]] = {}
        self.locks: list[Spans] = []
        self.now_s = 0.0

    def locked(self) -> set[Page]:
        return {page for spans in self.locks for page in path_pages(spans)}

    def acquire(self, spans: Spans) -> None:
        path = set(path_pages(spans))
        missing = path - self.resident
        idle = self.resident - self.locked() - path
        free = self.total - len(self.resident)
        possible = len(missing) <= free + len(idle)
        assert self.cache.lock(spans, self.now_s) == possible
        if possible:
            self.locks.append(spans)
            for index, page in enumerate(path_pages(spans)):
                self.needs.setdefault(page, set()).update(path_pages(spans)[:index])
            now = self.seen()
            evicted = self.resident - now
            assert evicted <= idle and len(evicted) == max(0, len(missing) - free)
            assert now == (self.resident | path) - evicted
            self.resident = now

    def grow(self, pick: int, more: int) -> None:
        """A lock grows along its own node: acquire the longer path, then let go of the shorter lock alone."""
        if not self.locks:
            return
        held = self.locks[pick % len(self.locks)]
        node, end = held[-1][0], held[-1][2]
        length = len(self.contents.paths[node])
        spans = self.contents.forest.spans(node, end + more % (length - end + 1))
        path, idle = set(path_pages(spans)), self.resident - self.locked() - set(path_pages(spans))
        free = self.total - len(self.resident)
        possible = len(path - self.resident) <= free + len(idle)
        assert self.cache.lock(spans, self.now_s, held=held) == possible
        if possible:
            self.locks[pick % len(self.locks)] = spans
            for index, page in enumerate(path_pages(spans)):
                self.needs.setdefault(page, set()).update(path_pages(spans)[:index])
            self.resident = self.seen()

    def release(self, pick: int, keep: int) -> None:
        if not self.locks:
            return
        spans = self.locks.pop(pick % len(self.locks))
        end = spans[-1][2]
        keep %= end + 1
        self.cache.release(spans, keep, self.now_s)
        for page in reversed(path_pages(spans)):
            needed = any(page in self.needs[other] for other in self.resident)
            if page[1] >= keep // PAGE and page not in self.locked() and not needed:
                self.resident.discard(page)

    def seen(self) -> set[Page]:
        pages = set()
        for node in self.contents.nodes:
            count = sum(n for _, n in self.cache.pages(node))
            start = next((s for n, s, _ in self.contents.forest.spans(node, len(self.contents.paths[node])) if n == node), 0)
            pages |= {(node, start // PAGE + index) for index in range(count)}
        return pages

    def check(self) -> None:
        assert self.seen() == self.resident
        locked = self.locked()
        assert locked <= self.resident
        assert self.cache.pool.used == len(self.resident) and self.cache.locked_pages == len(locked)
        assert self.cache.free_tokens() == (self.total - len(locked)) * PAGE
        physical = Counter(
            page for node in self.contents.nodes for first, n in self.cache.pages(node) for page in range(first, first + n)
        )
        assert all(uses == 1 for uses in physical.values()), "no page belongs to two owners"
        for node in self.contents.nodes:
            tokens = len(self.contents.paths[node])
            pages = path_pages(self.contents.forest.spans(node, tokens // PAGE * PAGE))
            run = next((i for i, page in enumerate(pages) if page not in self.resident), len(pages))
            assert self.cache.match(self.contents.forest.spans(node, tokens)) == run * PAGE


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["root", "extend", "branch", "acquire", "acquire", "release", "release", "extend_lock", "clear"]),
        st.integers(0, 60),
        st.integers(0, 60),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=200)
@given(OPERATIONS, st.integers(3, 16))
def test_locks_pages_and_matches_balance_under_any_sequence_of_operations(operations: list[tuple[str, int, int]], pages: int) -> None:
    oracle = Oracle(pages)
    contents = oracle.contents
    contents.forest.retain(contents.extend(contents.root(), 0, 10))
    for name, a, b in operations:
        oracle.now_s += 1.0
        node = contents.nodes[a % len(contents.nodes)]
        length = len(contents.paths[node])
        if name == "root":
            contents.forest.retain(contents.extend(contents.root(), 0, b % 20 + 1))
        elif name == "extend" and length < 60:
            contents.extend(node, length, length + b % 12)
        elif name == "branch" and length < 60:
            contents.forest.retain(contents.extend(node, b % (length + 1), b % (length + 1) + a % 12))
        elif name == "acquire" and length:
            oracle.acquire(contents.forest.spans(node, b % length + 1))
        elif name == "extend_lock":
            oracle.grow(a, b)
        elif name == "release":
            oracle.release(a, b)
        elif name == "clear" and not oracle.locks:
            oracle.cache.clear()
            oracle.resident.clear()
        oracle.check()


def test_a_lock_grows_with_its_sequence() -> None:
    forest, cache = cache_of(10)
    node = forest.new_root()
    forest.extend(node, 0, 10)
    short = forest.spans(node, 10)
    assert cache.lock(short, 0.0)
    forest.extend(node, 10, 25)
    long = forest.spans(node, 25)
    assert cache.lock(long, 1.0, held=short)
    assert cache.locked_pages == 7
    cache.release(long, 25, 2.0)
    assert (cache.locked_pages, cache.resident_tokens, cache.match(long)) == (0, 24, 24)


def test_a_growth_that_does_not_fit_leaves_the_shorter_lock() -> None:
    forest, cache = cache_of(4)
    node = forest.new_root()
    forest.extend(node, 0, 30)
    assert cache.lock(forest.spans(node, 10), 0.0)
    assert not cache.lock(forest.spans(node, 30), 1.0, held=forest.spans(node, 10))
    assert cache.locked_pages == 3 and cache.pool.used == 3
    cache.release(forest.spans(node, 10), 0, 2.0)
    assert cache.pool.used == 0


def test_idle_prefixes_go_least_recently_used_first_and_only_as_far_as_needed() -> None:
    forest, cache = cache_of(9)
    old, middle, new = (line(forest, 3 * PAGE) for _ in range(3))
    for now_s, spans in ((1.0, middle), (0.0, old), (2.0, new)):
        assert cache.lock(spans, now_s)
        cache.release(spans, 3 * PAGE, now_s)
    assert cache.lock(line(forest, 4 * PAGE), 3.0)
    assert [cache.match(spans) // PAGE for spans in (old, middle, new)] == [0, 2, 3]
    assert cache.evicted_pages == 4


def test_using_a_branch_does_not_refresh_the_abandoned_tail_of_its_ancestor() -> None:
    forest, cache = cache_of(8)
    root = forest.new_root()
    forest.extend(root, 0, 4 * PAGE)
    trunk = forest.spans(root, 4 * PAGE)
    assert cache.lock(trunk, 0.0)
    cache.release(trunk, 4 * PAGE, 0.0)
    other = line(forest, 2 * PAGE)
    assert cache.lock(other, 1.0)
    cache.release(other, 2 * PAGE, 1.0)
    rewritten = forest.spans(forest.extend(root, 2 * PAGE, 4 * PAGE), 4 * PAGE)
    assert cache.lock(rewritten, 2.0)
    cache.release(rewritten, 4 * PAGE, 2.0)
    assert cache.lock(line(forest, 2 * PAGE), 3.0)
    assert (cache.match(trunk), cache.match(other), cache.match(rewritten)) == (2 * PAGE, 2 * PAGE, 4 * PAGE)


def test_locked_pages_are_never_evicted() -> None:
    forest, cache = cache_of(4)
    held = line(forest, 3 * PAGE)
    assert cache.lock(held, 0.0)
    assert not cache.lock(line(forest, 2 * PAGE), 1.0)
    assert cache.match(held) == 3 * PAGE and cache.pool.used == 3


def test_tokens_beyond_what_is_kept_are_freed_at_once() -> None:
    forest, cache = cache_of(10)
    spans = line(forest, 30)
    assert cache.lock(spans, 0.0)
    cache.release(spans, 18, 1.0)
    assert cache.pool.used == 4 and cache.match(spans) == 16


def test_a_shared_prefix_is_stored_once_and_stays_while_one_path_needs_it() -> None:
    forest, cache = cache_of(10)
    root = forest.new_root()
    forest.extend(root, 0, 5 * PAGE)
    a, b = forest.spans(root, 5 * PAGE), forest.spans(forest.extend(root, 3 * PAGE, 5 * PAGE), 5 * PAGE)
    assert cache.lock(a, 0.0) and cache.lock(b, 0.0)
    assert cache.pool.used == 7
    cache.release(a, 0, 1.0)
    assert cache.pool.used == 5 and cache.match(b) == 5 * PAGE


def test_an_idle_branch_keeps_the_trunk_that_it_needs() -> None:
    forest, cache = cache_of(10)
    root = forest.new_root()
    forest.extend(root, 0, 5 * PAGE)
    trunk, branch = forest.spans(root, 5 * PAGE), forest.spans(forest.extend(root, 3 * PAGE, 5 * PAGE), 5 * PAGE)
    assert cache.lock(branch, 0.0)
    cache.release(branch, 5 * PAGE, 0.0)
    assert cache.lock(trunk, 1.0)
    cache.release(trunk, 0, 1.0)
    assert cache.pool.used == 5 and cache.match(branch) == 5 * PAGE


def test_a_short_use_does_not_free_the_idle_tail_of_a_longer_one() -> None:
    forest, cache = cache_of(10)
    long = line(forest, 5 * PAGE)
    assert cache.lock(long, 0.0)
    cache.release(long, 5 * PAGE, 0.0)
    short = forest.spans(long[0][0], 3 * PAGE)
    assert cache.lock(short, 1.0)
    cache.release(short, 0, 1.0)
    assert cache.match(long) == 5 * PAGE


def test_the_order_of_eviction_survives_any_number_of_uses() -> None:
    forest, cache = cache_of(6)
    often, once = line(forest, 3 * PAGE), line(forest, 3 * PAGE)
    assert cache.lock(once, 0.0)
    cache.release(once, 3 * PAGE, 0.0)
    for now_s in range(1, 500):
        assert cache.lock(often, now_s)
        cache.release(often, 3 * PAGE, now_s)
    assert cache.lock(line(forest, 3 * PAGE), 500.0)
    assert (cache.match(often), cache.match(once)) == (3 * PAGE, 0)


def test_a_branch_inside_a_page_has_its_own_copy_of_that_page() -> None:
    forest, cache = cache_of(10)
    root = forest.new_root()
    forest.extend(root, 0, 8)
    branch = forest.spans(forest.extend(root, 6, 8), 8)
    assert cache.lock(forest.spans(root, 8), 0.0)
    assert cache.match(branch) == 4
    assert cache.lock(branch, 0.0)
    assert cache.pool.used == 3


def test_new_extents_are_reported_once() -> None:
    forest, cache = cache_of(10)
    spans = line(forest, 10)
    assert cache.lock(spans, 0.0)
    assert cache.take_new_extents() == [(0, 3)] and cache.take_new_extents() == []
    cache.release(spans, 8, 1.0)
    assert cache.lock(spans, 2.0)
    assert cache.take_new_extents() == [(2, 1)]


def test_a_region_is_not_cleared_while_a_path_is_locked() -> None:
    forest, cache = cache_of(10)
    spans = line(forest, 10)
    assert cache.lock(spans, 0.0)
    with pytest.raises(ValueError, match="3 pages are locked"):
        cache.clear()
    cache.release(spans, 10, 1.0)
    cache.clear()
    assert (cache.pool.used, cache.resident_tokens, cache.match(spans)) == (0, 0, 0)


def test_a_release_without_its_lock_is_refused() -> None:
    forest, cache = cache_of(10)
    spans = line(forest, 10)
    with pytest.raises(ValueError, match="no hold"):
        cache.release(spans, 0, 0.0)


def test_what_a_cache_holds_stays_known_to_the_forest_until_it_is_evicted() -> None:
    forest, cache = cache_of(4)
    spans = line(forest, 3 * PAGE)
    node = spans[0][0]
    forest.retain(node)
    assert cache.lock(spans, 0.0)
    cache.release(spans, 3 * PAGE, 0.0)
    forest.release(node)
    assert node in forest
    assert cache.lock(line(forest, 4 * PAGE), 1.0)
    assert node not in forest
