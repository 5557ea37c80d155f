"""The short cuts around staging: what an allocation below the staged tail may skip, and why that is safe."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.extents import ExtentSet
from talaria.substrate.pages import PagePool
from talaria.substrate.staging import StagingMap

TOTAL = 60
PAGES = st.sets(st.integers(0, TOTAL - 1))


def pool_with(used: set[int]) -> PagePool:
    pool = PagePool(TOTAL)
    pool.alloc(TOTAL)
    pool.free((page, 1) for page in set(range(TOTAL)) - used)
    return pool


@given(PAGES, st.integers(0, TOTAL + 5), st.integers(0, TOTAL + 5))
def test_a_set_has_as_many_members_below_a_number_as_one_can_count(members: set[int], end: int, count: int) -> None:
    held = ExtentSet(*((member, 1) for member in sorted(members)))
    assert held.has_below(end, count) == (len([member for member in members if member < end]) >= count)


@given(PAGES, st.integers(0, TOTAL), st.integers(0, TOTAL))
def test_an_allocation_stays_below_a_page_exactly_if_it_takes_none_from_there_on(used: set[int], page: int, pages: int) -> None:
    pool = pool_with(used)
    stays = pool.stays_below(page, pages)
    if pages > pool.free_pages:
        assert not stays
    else:
        assert stays == all(first + count <= page for first, count in pool.alloc(pages))


@given(PAGES, st.sets(st.integers(0, TOTAL - 1), max_size=3))
def test_freeing_everything_leaves_only_what_is_blocked(used: set[int], writing: set[int]) -> None:
    pool = pool_with(used)
    for page in writing - used:
        pool.block(page, 1)
    pool.free_all()
    assert (pool.used, pool.free_pages) == (0, TOTAL - len(writing - used))


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.integers(1, 2000), st.integers(0, 4000))
def test_pages_below_the_reach_of_a_target_hold_none_of_its_chunks(layers: int, chunk: int, page: int, weights: int, staged: int) -> None:
    staging = StagingMap(layers, chunk, TOTAL, page)
    staging.begin("next", weights, 0)
    staging.advance(staged)
    staging.cancel_in_flight()
    clean, reach = staging.clean_bytes, staging.reach_page
    staging.dirty([(0, reach)])
    assert staging.clean_bytes == clean
    staging.dirty([(reach, TOTAL - reach)])
    assert staging.clean_bytes == 0
