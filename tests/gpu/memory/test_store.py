"""The books of the host pool with real bytes behind them: what is exposed is what every rank has written, in whatever order they do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from talaria.gpu.memory.layout import Buffer, PageLayout
from talaria.gpu.memory.paths import name_of
from talaria.gpu.memory.store import HostStore
from tests.gpu.memory.devices import SHAPES, SLAB, Host, chain, content, host_of


@pytest.fixture(params=[1, 2])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with host_of(40, request.param) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[Host]:
    with host_of(40, 2) as made:
        yield made


@pytest.mark.parametrize("model", SHAPES)
def test_a_prefix_comes_back_byte_for_byte(host: Host, model: str) -> None:
    engine, prompt = host.engine(model), chain("a", "b", "c")
    for rank in engine:
        assert rank.restore(host.store, prompt) == 0
    for rank in engine:
        assert rank.save(host.store, prompt)
    whole = 2 if model == "recurrent" else 3
    for rank in engine:
        assert rank.restore(host.store, chain("a", "b", "c", "d")) == whole
        assert rank.restore(host.store, chain("a", "b", "x")) == 2
        assert rank.restore(host.store, chain("x", "b", "c")) == 0
        assert rank.restore(host.store, prompt, from_page=1) == whole
    assert host.store.used_bytes == 3 * engine[0].seat.page_slabs * SLAB * len(engine)
    assert host.store.restorable(model, [name_of(digest) for digest in prompt], 0) == whole
    assert not host.store.registry.held_bytes


def test_recurrent_state_is_resumed_where_all_ranks_have_all_of_it_and_nowhere_else(pair: Host) -> None:
    """At the last position at which it was saved; a copy of it that failed on one rank declines the restore there, and is counted."""
    first, second = pair.engine("recurrent")
    store, prompt = pair.store, chain(*"abcdef")
    for rank in (first, second):
        rank.save(store, prompt[:2])
    for rank in (first, second):
        number, grant = rank.offer(store, prompt, 1.0)
        rank.write(prompt, grant)
        store.saved(rank.seat, number, complete=rank is first)
    for rank in (first, second):
        store.drain(rank.seat)
    for rank in (first, second):
        assert rank.restore(store, prompt) == 2
        assert rank.restore(store, [*prompt[:1], *chain("x")]) == 0
    assert store.registry.restore_skips == {"mha": 0, "mla": 0, "recurrent": 2}
    for rank in (first, second):
        rank.save(store, prompt[:5])
    assert first.restore(store, prompt) == second.restore(store, prompt) == 4
    for rank in (first, second):
        rank.save(store, prompt)
    assert first.restore(store, prompt) == second.restore(store, prompt) == 6


def test_what_one_rank_has_not_written_is_not_exposed(pair: Host) -> None:
    first, second = pair.engine("mha")
    prompt = chain("a", "b")
    assert first.save(pair.store, prompt)
    assert first.restore(pair.store, prompt) == second.restore(pair.store, prompt) == 0
    number, grant = second.offer(pair.store, prompt, 0.0)
    second.write(prompt, grant)
    assert first.restore(pair.store, prompt) == 0
    pair.store.saved(second.seat, number, complete=True)
    assert first.restore(pair.store, prompt) == second.restore(pair.store, prompt) == 2


def test_models_share_the_pool_and_no_prefix(host: Host) -> None:
    prompt = chain("a", "b")
    for rank in host.engine("mha"):
        rank.save(host.store, prompt)
    other = host.engine("mla")
    assert all(rank.restore(host.store, prompt) == 0 for rank in other)
    for rank in other:
        rank.save(host.store, prompt)
    assert all(rank.restore(host.store, prompt) == 2 for rank in host.ranks)


def test_a_barrier_closes_what_ranks_disagree_on_at_the_last_page_that_all_have(pair: Host) -> None:
    first, second = pair.engine("mha")
    long, short = chain(*"abcdef"), chain(*"abcd")
    first.save(pair.store, long)
    second.save(pair.store, short)
    assert first.restore(pair.store, long) == 0
    pair.store.drain(first.seat)
    assert first.restore(pair.store, long) == 0
    pair.store.drain(second.seat)
    assert first.restore(pair.store, long) == second.restore(pair.store, long) == 4
    assert not pair.store.registry.held_bytes
    for rank in (first, second):
        rank.save(pair.store, long)
    assert first.restore(pair.store, long) == second.restore(pair.store, long) == 6


def test_a_rank_that_comes_to_two_barriers_first_does_not_close_the_third_for_the_other(pair: Host) -> None:
    first, second = pair.engine("mha")
    for rank in (first, first, second, second):
        pair.store.drain(rank.seat)
    prompt = chain(*"abc")
    first.save(pair.store, prompt)
    number, grant = second.offer(pair.store, prompt, 0.0)
    pair.store.drain(first.seat)
    second.write(prompt, grant)
    pair.store.saved(second.seat, number, complete=True)
    pair.store.drain(second.seat)
    assert first.restore(pair.store, prompt) == second.restore(pair.store, prompt) == 3


def test_ranks_that_hash_differently_share_what_comes_before(pair: Host) -> None:
    first, second = pair.engine("mha")
    first.save(pair.store, chain(*"abcde"))
    second.save(pair.store, chain(*"abcxe"))
    for rank in (first, second):
        pair.store.drain(rank.seat)
    assert first.restore(pair.store, chain(*"abcde")) == second.restore(pair.store, chain(*"abcxe")) == 3
    assert pair.store.used_bytes == 3 * first.seat.page_slabs * SLAB * 2


def test_a_barrier_of_one_model_leaves_another_ones_copies_alone(pair: Host) -> None:
    first, second = pair.engine("mha")
    other, peer = pair.engine("mla")
    prompt = chain("a", "b")
    number, grant = other.offer(pair.store, prompt, 0.0)
    for rank in (first, second):
        rank.save(pair.store, prompt)
        pair.store.drain(rank.seat)
    assert first.restore(pair.store, prompt) == 2
    other.write(prompt, grant)
    pair.store.saved(other.seat, number, complete=True)
    peer.save(pair.store, prompt)
    assert other.restore(pair.store, prompt) == 2


def test_a_copy_that_failed_voids_its_pages_until_they_are_written_again(host: Host) -> None:
    """As soon as all ranks have said how theirs ended, without a barrier."""
    engine, prompt = host.engine("mha"), chain("a", "b")
    for rank in engine:
        assert host.store.used_bytes or rank.rank == 0
        number, _ = rank.offer(host.store, prompt, 0.0)
        host.store.saved(rank.seat, number, complete=rank.rank > 0)
    assert host.store.used_bytes == 0 and not host.store.registry.held_bytes
    assert all(rank.restore(host.store, prompt) == 0 for rank in engine)
    for rank in engine:
        rank.save(host.store, prompt)
    assert all(rank.restore(host.store, prompt) == 2 for rank in engine)


def test_a_failed_copy_waits_for_ranks_that_may_still_write_and_leaves_what_all_have(pair: Host) -> None:
    first, second = pair.engine("mha")
    store, prompt = pair.store, chain(*"abcd")
    late, grant = first.offer(store, prompt, 0.0)
    second.save(store, prompt[:2])
    number, _ = second.offer(store, prompt, 0.0)
    store.saved(second.seat, number, complete=False)
    assert store.pool.total - store.pool.free == 4 * first.seat.page_slabs, "another rank is writing"
    first.write(prompt, grant)
    store.saved(first.seat, late, complete=True)
    assert first.restore(store, prompt) == second.restore(store, prompt) == 2
    assert store.pool.total - store.pool.free == 2 * first.seat.page_slabs and not store.registry.held_bytes
    for rank in (first, second):
        rank.save(store, prompt)
    assert first.restore(store, prompt) == second.restore(store, prompt) == 4


@pytest.mark.parametrize("beyond", [False, True])
def test_what_comes_after_void_pages_is_void_too(pair: Host, beyond: bool) -> None:
    """A copy of the first pages has failed on one rank; of what follows all ranks have a part when the barrier comes.

    With a third copy ``beyond`` them the registry keeps the place of the first pages, in which there is nothing.
    """
    first, second = pair.engine("mha")
    store, prompt = pair.store, chain(*"abcdefgh")
    for rank in (first, second):
        ends = [3, 6 if rank is first else 5, *([8] if beyond and rank is first else [])]
        for end in ends:
            number, grant = rank.offer(store, prompt[:end], 0.0)
            failed = end == 3 and rank is second
            if not failed:
                rank.write(prompt, grant)
            store.saved(rank.seat, number, complete=not failed)
    for rank in (first, second):
        store.drain(rank.seat)
    assert first.restore(store, prompt) == second.restore(store, prompt) == 0
    assert store.audit() == []
    for rank in (first, second):
        rank.save(store, prompt)
    assert first.restore(store, prompt) == second.restore(store, prompt) == 8


def test_a_full_pool_evicts_the_oldest_and_refuses_what_is_held(host: Host) -> None:
    engine = host.engine("mha")
    pages = host.store.pool.total // engine[0].seat.page_slabs
    old, new, huge = chain(*(f"old{page}" for page in range(pages))), chain("new"), chain(*map(str, range(pages + 1)))
    for rank in engine:
        assert rank.save(host.store, old, 1.0)
    assert not engine[0].save(host.store, huge, 2.0)
    for rank in engine:
        assert host.store.find(rank.seat, "returning", old)[0] == pages
    assert not engine[0].save(host.store, new, 3.0)
    for rank in engine:
        host.store.done(rank.seat, "returning")
    for rank in engine:
        assert rank.save(host.store, new, 4.0)
    assert all(rank.restore(host.store, new) == 1 for rank in engine)
    assert all(rank.restore(host.store, old) == pages - 1 for rank in engine)
    assert host.store.registry.evictions == 1


def test_pins_and_references_go_apart(host: Host) -> None:
    engine, prompt = host.engine("mha"), chain("a")
    for rank in engine:
        rank.save(host.store, prompt)
    seat, registry = engine[0].seat, host.store.registry
    host.store.find(seat, "one", prompt)
    held = registry.held_bytes
    assert held > 0
    host.store.pin(seat, "one", 1)
    host.store.find(seat, "two", prompt)
    host.store.done(seat, "one")
    assert registry.held_bytes == held
    host.store.done(seat, "two")
    assert registry.held_bytes == 0
    host.store.done(seat, "two")


def test_an_engine_that_dies_leaves_its_pages_and_nothing_else(pair: Host) -> None:
    first, second = pair.engine("mha")
    done, begun = chain("a", "b"), chain("a", "b", "c", "d")
    for rank in (first, second):
        rank.save(pair.store, done)
    number, grant = first.offer(pair.store, begun, 1.0)
    second.offer(pair.store, begun, 1.0)
    pair.store.find(first.seat, "request", done)
    pair.store.leave(second.seat)
    assert pair.store.audit() == []
    free = pair.store.pool.free
    other = pair.engine("mla")
    for rank in other:
        rank.save(pair.store, chain("x"))
    first.write(begun, grant)  # it does not know yet that its peer is gone
    assert all(rank.restore(pair.store, chain("x")) == 1 for rank in other)
    pair.store.leave(first.seat)
    for rank in (first, second):
        pair.store.gone(rank.seat)
    assert pair.store.pool.free > free - other[0].seat.page_slabs
    again = pair.engine("mha")
    assert all(rank.restore(pair.store, begun) == 2 for rank in again)
    assert pair.store.audit() == []
    pair.store.saved(first.seat, number, complete=True)


def test_what_a_rank_may_still_touch_is_nobody_elses_until_its_process_is_gone(host: Host) -> None:
    """Its connection is closed, since it said something wrong, and its copies go on."""
    engine, other = host.engine("mha"), host.engine("mla")
    store, begun, found, filler = host.store, chain("b1", "b2"), chain("f1", "f2"), [chain(f"x{number}") for number in range(40)]
    for rank in engine:
        rank.save(store, found)
    for rank in engine:
        assert store.find(rank.seat, "reading", found)[0] == 2
        store.pin(rank.seat, "reading", 2)
    slabs = store.find(engine[0].seat, "also reading", found)[1]
    grants = [rank.offer(store, begun, 1.0)[1] for rank in engine]
    for rank in engine:
        store.leave(rank.seat)
    for prompt in filler:
        for rank in other:
            rank.save(store, prompt, 2.0)
    for rank, grant in zip(engine, grants, strict=True):
        rank.write(begun, grant)
    kept = sum(rank.restore(store, prompt) for rank in other for prompt in filler)
    assert kept >= 5 * len(other), "too little of the other model is there to be overwritten"
    for number, rank in enumerate(engine):
        rank.stream.copy(rank.layout.to_device([8, 9], slabs, 0)).wait()
        whole = [content("mha", rank.rank, digest, rank.layout.page_bytes) for digest in found]
        half = sum(SHAPES["mha"][0])
        assert [rank.page(page)[:half] for page in (8, 9)] == [page[:half] for page in whole]
        assert store.audit() == []
        store.gone(rank.seat)
        assert (store.registry.held_bytes == 0) == (number == len(engine) - 1)
    again = host.engine("mha")
    assert all(rank.restore(store, begun) == 0 for rank in again)


def test_a_pool_smaller_than_a_page_is_refused_at_once() -> None:
    store = HostStore(4, SLAB, 1)
    with pytest.raises(ValueError, match="raise host_kv_gib"):
        store.join("mha", 0, 4 * SLAB + 1)
    store.join("mha", 0, 4 * SLAB)


def test_a_seat_is_taken_once(host: Host) -> None:
    host.engine("mha")
    with pytest.raises(ValueError, match="taken"):
        host.store.join("mha", 0, 96)
    with pytest.raises(ValueError, match="of"):
        host.store.join("mha", host.store.ranks, 96)


def test_a_cleared_pool_is_empty_and_goes_on(host: Host) -> None:
    engine, prompt = host.engine("mha"), chain("a", "b")
    for rank in engine:
        rank.save(host.store, prompt)
    host.store.find(engine[0].seat, "late", prompt)
    host.store.clear()
    host.store.done(engine[0].seat, "late")
    assert host.store.pool.free == host.store.pool.total
    assert all(rank.restore(host.store, prompt) == 0 for rank in engine)
    for rank in engine:
        rank.save(host.store, prompt)
    assert all(rank.restore(host.store, prompt) == 2 for rank in engine)


def test_a_layout_cuts_pages_at_slabs_and_loses_no_byte() -> None:
    layout = PageLayout([Buffer(0, 0, 100), Buffer(0, 10_000, 30), Buffer(1, 20_000, 100)], SLAB)
    assert (layout.page_bytes, layout.page_slabs, layout.layers) == (230, 4, 2)
    whole = layout.to_pool([3], [7, 1, 9, 2])
    layers = [layout.to_device([3], [7, 1, 9, 2], layer) for layer in range(2)]
    assert np.array_equal(np.concatenate([layer.source for layer in layers]), whole.to)
    assert np.array_equal(np.concatenate([layer.to for layer in layers]), whole.source)
    assert whole.nbytes.sum() == 230
    covered = sorted(at for start, size in zip(whole.to, whole.nbytes, strict=True) for at in range(start, start + size))
    assert len(set(covered)) == 230
    assert {at // SLAB for at in covered} == {7, 1, 9, 2}
