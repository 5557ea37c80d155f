"""The staging map against a list with one state per chunk, whose rows are counted in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.pages import PagePool
from talaria.substrate.staging import StagingMap


class Chunks:
    """One state per chunk, by the letter of SPEC §5.3."""

    def __init__(self, layers: int, chunk: int, pages: int, page: int, weights: int) -> None:
        self.layers, self.chunk, self.page, self.weights = layers, chunk, page, weights
        self.layer_bytes = pages * page
        self.states = ["missing"] * -(-weights // chunk)
        self.copied = 0
        self.writing: int | None = None

    def rows(self, index: int) -> set[int]:
        high = self.layer_bytes - index // self.layers * self.chunk
        return {byte // self.page for byte in range(high - self.chunk, high)}

    def size(self, index: int) -> int:
        return min(self.chunk, self.weights - index * self.chunk)

    def stageable(self, index: int, tail: int) -> bool:
        rows = self.rows(index)
        return min(rows) >= 0 and min(rows) >= tail

    def advance(self, nbytes: int, tail: int) -> int:
        done = 0
        while done < nbytes:
            if self.writing is None:
                free = [i for i, state in enumerate(self.states) if state != "clean" and self.stageable(i, tail)]
                if not free:
                    break
                self.writing, self.copied = free[0], 0
            step = min(nbytes - done, self.size(self.writing) - self.copied)
            self.copied += step
            done += step
            if self.copied == self.size(self.writing):
                self.states[self.writing], self.writing = "clean", None
        return done

    def dirty(self, pages: set[int]) -> None:
        for index, state in enumerate(self.states):
            if state == "clean" and self.rows(index) & pages:
                self.states[index] = "dirty"

    def bytes_in(self, state: str) -> int:
        return sum(self.size(i) for i, s in enumerate(self.states) if s == state)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 20), st.integers(1, 7), st.integers(1, 150)),
    st.lists(st.tuples(st.sampled_from(["advance", "alloc", "free"]), st.integers(0, 60)), max_size=30),
)
def test_the_map_agrees_with_one_state_per_chunk(geometry: tuple[int, int, int, int, int], operations: list[tuple[str, int]]) -> None:
    layers, chunk, pages, page, weights = geometry
    staging, oracle, pool = StagingMap(layers, chunk, pages, page), Chunks(*geometry), PagePool(pages)
    staging.begin("next", weights, 0)
    allocated: list[list[tuple[int, int]]] = []
    for name, amount in operations:
        if name == "advance":
            barrier = staging.in_flight_pages
            if barrier:
                pool.unblock(*barrier)
            assert staging.advance(amount, pool.high_water) == oracle.advance(amount, pool.high_water)
            barrier = staging.in_flight_pages
            assert (set(range(barrier[0], sum(barrier))) if barrier else None) == (
                None if oracle.writing is None else oracle.rows(oracle.writing)
            )
            if barrier:
                pool.block(*barrier)
        elif name == "alloc" and amount % 6 <= pool.free_pages:
            extents = pool.alloc(amount % 6)
            allocated.append(extents)
            staging.dirty(extents)
            oracle.dirty({number for first, count in extents for number in range(first, first + count)})
        elif name == "free" and allocated:
            pool.free(allocated.pop(amount % len(allocated)))
        clean, dirty = oracle.bytes_in("clean"), oracle.bytes_in("dirty")
        assert (staging.clean_bytes, staging.dirty_bytes) == (clean, dirty)
        plan = staging.gather_plan()
        assert (plan.d2d_bytes, plan.h2d_bytes) == (clean, weights - clean), "H2D is the uncovered and the dirty, exactly"
        assert {i for first, count in plan.clean for i in range(first, first + count)} == {
            i for i, state in enumerate(oracle.states) if state == "clean"
        }
        assert plan.path == ("d2d" if clean == weights else "partial" if clean else "h2d")
        slots = -(-pages * page // chunk) * layers
        free = [i for i in range(slots) if oracle.stageable(i, staging.tail_first_page)]
        assert staging.slack_bytes == chunk * sum(1 for i in free if i >= len(oracle.states) or oracle.states[i] != "clean")


def staged(weight_bytes: int, nbytes: int) -> StagingMap:
    """Two layers of 100 pages of 10 bytes; chunks of 40 bytes are four pages high."""
    staging = StagingMap(2, 40, 100, 10)
    staging.begin("next", weight_bytes, 0)
    staging.advance(nbytes)
    return staging


def test_chunks_fill_the_highest_rows_of_every_layer_first() -> None:
    staging = staged(400, 100)
    assert staging.in_flight_pages == (92, 4), "two chunks in the top row, the third begun in the next"


def test_progress_within_a_chunk_is_carried_and_does_not_count_as_coverage() -> None:
    staging = staged(400, 30)
    assert staging.coverage() == 0.0 and staging.gather_plan().path == "h2d"
    assert staging.advance(10) == 10
    assert staging.coverage() == 0.1 and staging.in_flight_pages is None


def test_a_chunk_is_dirty_once_an_allocation_overlaps_its_rows_in_any_layer() -> None:
    staging = staged(160, 160)
    assert staging.gather_plan().path == "d2d"
    staging.dirty([(0, 92)])
    assert staging.dirty_share() == 0.0
    staging.dirty([(95, 1)])
    assert (staging.coverage(), staging.dirty_share()) == (0.5, 0.5)


def test_a_dirty_chunk_is_staged_again_once_its_rows_are_free() -> None:
    staging = staged(160, 160)
    staging.dirty([(92, 8)])
    assert staging.advance(160) == 0, "no free tail"
    assert staging.advance(160, tail_first_page=92) == 160
    assert (staging.coverage(), staging.dirty_share()) == (1.0, 0.0)


def test_the_allocator_skips_the_rows_of_the_chunk_in_flight() -> None:
    staging, pool = staged(400, 100), PagePool(100)
    barrier = staging.in_flight_pages
    assert barrier == (92, 4)
    pool.block(*barrier)
    extents = pool.alloc(96)
    assert extents == [(0, 92), (96, 4)]
    staging.dirty(extents)
    assert staging.coverage() == 0.0 and staging.dirty_bytes == 80, "the two complete chunks of the top row"
    pool.unblock(*barrier)
    assert staging.advance(20) == 20 and staging.coverage() == 0.1


def test_an_allocation_into_the_chunk_in_flight_is_a_broken_barrier() -> None:
    staging = staged(400, 30)
    with pytest.raises(ValueError, match="overlap the chunk in flight"):
        staging.dirty([(0, 97)])
    staging.cancel_in_flight()
    staging.dirty([(0, 97)])
    assert staging.in_flight_pages is None


def test_weights_beyond_the_tail_stay_uncovered() -> None:
    staging = staged(4000, 4000)
    assert staging.coverage() == 0.5 and staging.slack_bytes == 0
    assert staging.gather_plan().h2d_bytes == 2000


def test_a_new_target_starts_with_nothing_staged() -> None:
    staging = staged(160, 160)
    staging.begin("other", 80, 0)
    assert staging.target == "other" and staging.coverage() == 0.0
    staging.cancel()
    assert staging.target is None and staging.coverage() == 0.0
    with pytest.raises(ValueError, match="nothing is being staged"):
        staging.gather_plan()


def test_a_large_model_is_a_few_extents() -> None:
    staging = StagingMap(94, 16 << 20, 20_000, 32 << 10)
    staging.begin("next", 58_750_000_000, 0)
    staging.advance(58_750_000_000)
    staging.dirty([(0, 16_000)])
    plan = staging.gather_plan()
    assert len(plan.clean) == 1 and plan.path == "partial" and plan.d2d_bytes + plan.h2d_bytes == 58_750_000_000


def test_impossible_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="layers=0"):
        StagingMap(0, 1, 1, 1)
    with pytest.raises(ValueError, match="weight_bytes=0"):
        StagingMap(1, 1, 1, 1).begin("next", 0, 0)
    with pytest.raises(ValueError, match="nbytes=-1"):
        StagingMap(1, 1, 1, 1).advance(-1)
