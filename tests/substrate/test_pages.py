"""Extents and page pools against sets of single numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.extents import ExtentSet
from talaria.substrate.pages import OutOfPages, PagePool

SIZE = 40
RANGES = st.tuples(st.integers(0, SIZE - 1), st.integers(1, 8))


def members(extents: object) -> set[int]:
    return {number for first, count in extents for number in range(first, first + count)}  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "lowest", "range"]), RANGES), max_size=40))
def test_an_extent_set_behaves_like_a_set_of_numbers(operations: list[tuple[str, tuple[int, int]]]) -> None:
    extents, numbers = ExtentSet(), set()
    for name, (first, count) in operations:
        wanted = set(range(first, first + count))
        if name == "add" and not wanted & numbers:
            extents.add(first, count)
            numbers |= wanted
        elif name == "add":
            with pytest.raises(ValueError, match="overlaps"):
                extents.add(first, count)
        elif name == "remove" and wanted <= numbers:
            extents.remove(first, count)
            numbers -= wanted
        elif name == "remove":
            with pytest.raises(ValueError, match="not wholly"):
                extents.remove(first, count)
        elif name == "lowest" and count <= len(numbers):
            lowest = sorted(numbers)[:count]
            assert sorted(members(extents.take_lowest(count))) == lowest
            numbers -= set(lowest)
        elif name == "range":
            assert members(extents.take_range(first, first + count)) == wanted & numbers
            numbers -= wanted
        assert members(extents) == numbers and extents.total == len(numbers)
        runs = list(extents)
        assert all(a + n < b for (a, n), (b, _) in pairwise(runs)), "neighbours are merged"
        assert members(extents.within(first, first + count)) == numbers & wanted
        assert members(extents.gaps(first, first + count)) == wanted - numbers
        assert extents.first_gap(first, first + count) == next(iter(extents.gaps(first, first + count)), None)
        assert extents.count_below(first) == len({number for number in numbers if number < first})
        assert extents.end == max(numbers, default=-1) + 1
        assert extents.run_end(first) == next(n for n in range(first, SIZE + 20) if n not in numbers)
        assert extents.run_start(first) == next(n for n in range(first, -1, -1) if n - 1 not in numbers)


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "block", "unblock"]), RANGES), max_size=40))
def test_a_pool_gives_the_lowest_free_unblocked_pages_and_balances(operations: list[tuple[str, tuple[int, int]]]) -> None:
    pool = PagePool(SIZE)
    free, blocked = set(range(SIZE)), set()
    allocated: list[list[tuple[int, int]]] = []
    barriers: list[tuple[int, int]] = []
    for name, (first, count) in operations:
        if name == "alloc" and count <= len(free):
            extents = pool.alloc(count)
            assert members(extents) == set(sorted(free)[:count]), "low addresses first, rows of a write in flight skipped"
            free -= members(extents)
            allocated.append(extents)
        elif name == "alloc":
            with pytest.raises(OutOfPages):
                pool.alloc(count)
        elif name == "free" and allocated:
            extents = allocated.pop(first % len(allocated))
            pool.free(extents)
            free |= members(extents)
        elif name == "block" and set(range(first, first + count)) <= free:
            pool.block(first, count)
            barriers.append((first, count))
            free -= set(range(first, first + count))
            blocked |= set(range(first, first + count))
        elif name == "unblock" and barriers:
            barrier = barriers.pop(first % len(barriers))
            pool.unblock(*barrier)
            free |= members([barrier])
            blocked -= members([barrier])
        used = set(range(SIZE)) - free - blocked
        assert (pool.used, pool.free_pages) == (len(used), len(free))
        assert pool.high_water == max(used, default=-1) + 1


def test_a_page_cannot_be_freed_twice_or_while_it_is_blocked_or_beyond_the_pool() -> None:
    pool = PagePool(10)
    pool.alloc(4)
    pool.free([(0, 2)])
    pool.block(6, 2)
    for extent in ((0, 1), (1, 2), (6, 1), (9, 2)):
        with pytest.raises(ValueError, match=r"not in use|overlaps"):
            pool.free([extent])
    assert (pool.used, pool.free_pages) == (2, 6)


def test_only_free_pages_can_be_blocked() -> None:
    pool = PagePool(10)
    pool.alloc(4)
    with pytest.raises(ValueError, match="not wholly"):
        pool.block(3, 2)
    assert pool.free_pages == 6


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = PagePool(10)
    pool.alloc(8)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 of 10 free"):
        pool.alloc(3)
    assert pool.alloc(2) == [(8, 2)]


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="total_pages=-1"):
        PagePool(-1)
    with pytest.raises(ValueError, match="pages=-1"):
        PagePool(1).alloc(-1)
