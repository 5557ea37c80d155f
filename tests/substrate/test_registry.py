"""The host registry: its invariants one by one."""

from __future__ import annotations

import pytest

from talaria.substrate.prefix import PrefixForest, Spans
from talaria.substrate.registry import HostRegistry, Ticket

PAGE = 4


def line(forest: PrefixForest, pages: int) -> Spans:
    node = forest.new_root()
    forest.retain(node)
    forest.extend(node, 0, pages * PAGE)
    return forest.spans(node, pages * PAGE)


def registry_of(pages: int, **options: int) -> tuple[PrefixForest, HostRegistry]:
    """Room for so many pages of models with one byte a token."""
    forest = PrefixForest()
    return forest, HostRegistry(pages * PAGE, page_tokens=PAGE, forest=forest, **options)


def store(registry: HostRegistry, spans: Spans, now_s: float, owner: str | None = None, model: str = "m") -> None:
    ticket = registry.checkpoint(model, spans, 1, now_s, owner=owner)
    assert ticket is not None
    registry.commit_all(ticket)


# --- a block that is not complete is never exposed ----------------------------------------------------------------------


def test_a_pending_copy_is_not_exposed_until_every_rank_has_committed_it() -> None:
    forest, registry = registry_of(10, ranks=2)
    spans = line(forest, 3)
    ticket = registry.checkpoint("m", spans, 1, 0.0)
    assert ticket is not None and ticket.bytes == 3 * PAGE and registry.outstanding("m") == (ticket,)
    registry.commit(ticket, 1)
    assert registry.match("m", spans) == 0
    registry.commit(ticket, 0)
    assert registry.match("m", spans) == 3 * PAGE and registry.outstanding("m") == ()


def test_only_what_is_not_yet_committed_or_pending_is_copied() -> None:
    forest, registry = registry_of(10)
    node = forest.new_root()
    forest.extend(node, 0, 10)
    first = registry.checkpoint("m", forest.spans(node, 10), 1, 0.0)
    assert first is not None and first.parts == ((node, 0, 2),), "full pages only"
    assert registry.checkpoint("m", forest.spans(node, 10), 1, 0.0) is None
    forest.extend(node, 10, 20)
    second = registry.checkpoint("m", forest.spans(node, 20), 1, 1.0)
    assert second is not None and second.parts == ((node, 2, 3),)
    registry.commit_all(second)
    assert registry.match("m", forest.spans(node, 20)) == 0, "what lies before is still pending"
    assert registry.match("m", forest.spans(node, 20), from_tokens=8) == 20
    registry.commit_all(first)
    assert registry.match("m", forest.spans(node, 20)) == 20


def test_an_aborted_copy_is_never_exposed_and_gives_its_room_back() -> None:
    forest, registry = registry_of(10)
    spans = line(forest, 3)
    ticket = registry.checkpoint("m", spans, 1, 0.0)
    assert ticket is not None
    registry.abort(ticket)
    assert (registry.match("m", spans), registry.used_bytes, registry.held_bytes) == (0, 0, 0)
    for end in (registry.commit_all, registry.abort):
        with pytest.raises(ValueError, match="has ended"):
            end(ticket)
    with pytest.raises(ValueError, match="nothing to commit"):
        registry.commit(ticket, 0)


def test_a_hole_left_by_an_aborted_copy_is_copied_again() -> None:
    forest, registry = registry_of(10)
    node = forest.new_root()
    forest.extend(node, 0, 8)
    first = registry.checkpoint("m", forest.spans(node, 8), 1, 0.0)
    forest.extend(node, 8, 16)
    second = registry.checkpoint("m", forest.spans(node, 16), 1, 0.0)
    assert first is not None and second is not None
    registry.abort(first)
    registry.commit_all(second)
    assert registry.match("m", forest.spans(node, 16)) == 0
    again = registry.checkpoint("m", forest.spans(node, 16), 1, 1.0)
    assert again is not None and again.parts == ((node, 0, 2),) and registry.used_bytes == 16
    registry.commit_all(again)
    assert registry.match("m", forest.spans(node, 16)) == 16


# --- lifetime separation --------------------------------------------------------------------------------------------------


def test_a_pinned_block_is_not_reclaimed_though_unreferenced() -> None:
    forest, registry = registry_of(4)
    spans = line(forest, 3)
    store(registry, spans, 0.0)
    reference, pin = registry.ref("m", spans, 12), registry.pin("m", spans, 12)
    registry.unref(reference)
    assert registry.checkpoint("m", line(forest, 2), 1, 1.0) is None
    registry.unpin(pin)
    assert registry.checkpoint("m", line(forest, 2), 1, 1.0) is not None
    assert registry.match("m", spans) == 8 and registry.evictions == 1


def test_a_referenced_block_is_not_reclaimed_though_unpinned() -> None:
    forest, registry = registry_of(4)
    spans = line(forest, 3)
    store(registry, spans, 0.0)
    pin, reference = registry.pin("m", spans, 12), registry.ref("m", spans, 12)
    registry.unpin(pin)
    assert registry.checkpoint("m", line(forest, 2), 1, 1.0) is None
    registry.unref(reference)
    assert registry.held_bytes == 0


def test_a_pin_and_a_reference_end_each_by_its_own_kind_and_once() -> None:
    forest, registry = registry_of(4)
    spans = line(forest, 3)
    store(registry, spans, 0.0)
    pin = registry.pin("m", spans, 12)
    with pytest.raises(ValueError, match="of the other kind"):
        registry.unref(pin)
    registry.unpin(pin)
    with pytest.raises(ValueError, match="has ended"):
        registry.unpin(pin)


def test_a_path_that_is_not_all_here_cannot_be_pinned() -> None:
    forest, registry = registry_of(4)
    node = forest.new_root()
    forest.extend(node, 0, 12)
    store(registry, forest.spans(node, 8), 0.0)
    with pytest.raises(ValueError, match="not all held"):
        registry.pin("m", forest.spans(node, 12), 12)
    assert registry.held_bytes == 0
    registry.unpin(registry.pin("m", forest.spans(node, 12), 8))


def test_a_pending_copy_is_never_reclaimed() -> None:
    forest, registry = registry_of(4)
    ticket = registry.checkpoint("m", line(forest, 3), 1, 0.0)
    assert ticket is not None
    assert registry.checkpoint("m", line(forest, 2), 1, 1.0) is None
    registry.commit_all(ticket)
    assert registry.checkpoint("m", line(forest, 2), 1, 1.0) is not None


# --- switch barrier ---------------------------------------------------------------------------------------------------------


def test_only_a_models_own_copies_block_its_switch() -> None:
    forest, registry = registry_of(10)
    a = registry.checkpoint("a", line(forest, 2), 1, 0.0)
    b = registry.checkpoint("b", line(forest, 2), 1, 0.0)
    assert a is not None and b is not None
    assert registry.outstanding("a") == (a,) and registry.outstanding("b") == (b,)
    registry.commit_all(a)
    assert registry.outstanding("a") == () and registry.outstanding("b") == (b,)


def test_a_model_is_dropped_only_after_it_is_drained() -> None:
    forest, registry = registry_of(10)
    root = forest.new_root()
    forest.retain(root)
    forest.extend(root, 0, 12)
    store(registry, forest.spans(root, 12), 0.0, model="a")
    store(registry, forest.spans(forest.extend(root, 8, 16), 16), 0.0, model="a")
    kept = line(forest, 2)
    store(registry, kept, 0.0, model="b")
    pin = registry.pin("a", forest.spans(root, 12), 12)
    with pytest.raises(ValueError, match="drain them first"):
        registry.drop("a")
    registry.unpin(pin)
    registry.drop("a")
    assert registry.match("a", forest.spans(root, 12)) == 0 and registry.match("b", kept) == 8
    assert registry.used_bytes == 8


def test_the_same_prefix_under_two_models_is_two_entries() -> None:
    forest, registry = registry_of(10)
    spans = line(forest, 2)
    store(registry, spans, 0.0, model="a")
    assert registry.match("b", spans) == 0
    store(registry, spans, 0.0, model="b")
    assert registry.used_bytes == 16


# --- family completeness ------------------------------------------------------------------------------------------------------


def recurrent(checkpoint_tokens: int, ranks: int = 1) -> tuple[HostRegistry, Spans, Ticket, PrefixForest]:
    forest, registry = registry_of(20, ranks=ranks)
    registry.register("m", "recurrent", checkpoint_tokens)
    spans = line(forest, 7)
    ticket = registry.checkpoint("m", spans, 1, 0.0)
    assert ticket is not None
    return registry, spans, ticket, forest


def test_a_recurrent_model_resumes_at_the_longest_checkpointed_position_within_the_agreed_prefix() -> None:
    registry, spans, ticket, forest = recurrent(12)
    registry.commit_all(ticket)
    assert registry.match("m", spans) == 24
    node = spans[0][0]
    assert registry.match("m", forest.spans(node, 23)) == 12
    assert registry.match("m", spans, from_tokens=16) == 24
    assert registry.match("m", spans, from_tokens=24) == 24


def test_a_rewrite_before_the_first_checkpointed_position_reuses_nothing() -> None:
    registry, spans, ticket, forest = recurrent(12)
    registry.commit_all(ticket)
    rewritten = forest.spans(forest.extend(spans[0][0], 11, 40), 40)
    assert registry.match("m", rewritten) == 0
    assert registry.declines("m", rewritten) and registry.restore_skips == {"mha": 0, "mla": 0, "recurrent": 1}


def test_an_incomplete_recurrent_state_declines_the_restore_and_is_counted_by_family() -> None:
    registry, spans, ticket, forest = recurrent(12, ranks=2)
    registry.commit(ticket, 0, state_complete=False)
    registry.commit(ticket, 1)
    assert registry.match("m", spans) == 0
    assert registry.declines("m", spans) and registry.declines("m", spans, from_tokens=8)
    assert not registry.declines("m", spans, from_tokens=28), "nothing left to restore"
    assert registry.restore_skips["recurrent"] == 2
    node = spans[0][0]
    forest.extend(node, 28, 40)
    second = registry.checkpoint("m", forest.spans(node, 40), 1, 1.0)
    assert second is not None
    registry.commit_all(second)
    assert registry.match("m", forest.spans(node, 40)) == 36, "the later state is complete"
    assert registry.match("m", forest.spans(node, 35)) == 0, "the earlier ones are not"


def test_attention_families_resume_anywhere_on_a_page() -> None:
    for family in ("mha", "mla"):
        forest, registry = registry_of(20)
        registry.register("m", family)
        spans = line(forest, 7)
        ticket = registry.checkpoint("m", spans, 1, 0.0)
        assert ticket is not None
        registry.commit_all(ticket)
        assert registry.match("m", spans) == 28 and not registry.declines("m", spans)


def test_each_recurrent_model_has_a_checkpoint_spacing_of_its_own() -> None:
    forest, registry = registry_of(40)
    spans = line(forest, 7)
    registry.register("narrow", "recurrent", 8)
    registry.register("wide", "recurrent", 20)
    for model in ("narrow", "wide", "attention"):
        store(registry, spans, 0.0, model=model)
    assert [registry.match(model, spans) for model in ("narrow", "wide", "attention")] == [24, 20, 28]


def test_a_model_has_one_known_family_and_a_spacing_that_suits_it() -> None:
    forest, registry = registry_of(20)
    store(registry, line(forest, 1), 0.0)
    for family, spacing in (("mamba", 0), ("recurrent", 0), ("recurrent", 6), ("recurrent", -4), ("mla", 4)):
        with pytest.raises(ValueError, match="allowed mha, mla, recurrent; a multiple of 4 for recurrent, 0 for the others"):
            registry.register("other", family, spacing)
    registry.register("hybrid", "recurrent", 8)
    registry.register("hybrid", "recurrent", 8)
    for model, family, spacing in (("m", "mla", 0), ("hybrid", "recurrent", 12)):
        with pytest.raises(ValueError, match="is registered otherwise"):
            registry.register(model, family, spacing)


# --- capacity and eviction -----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first() -> None:
    forest, registry = registry_of(6)
    old, new = line(forest, 3), line(forest, 3)
    store(registry, new, 0.0)
    store(registry, old, 1.0)
    assert registry.checkpoint("m", new, 1, 2.0) is None, "nothing to copy, but used"
    store(registry, line(forest, 2), 3.0)
    assert (registry.match("m", old), registry.match("m", new)) == (4, 12)


def test_a_shared_ancestor_outlives_its_leaves() -> None:
    forest, registry = registry_of(6)
    root = forest.new_root()
    forest.extend(root, 0, 8)
    trunk = forest.spans(root, 8)
    store(registry, trunk, 0.0)
    branch = forest.spans(forest.extend(root, 4, 16), 16)
    store(registry, branch, 1.0)
    assert registry.used_bytes == 20
    store(registry, line(forest, 4), 2.0)
    assert registry.match("m", branch) == 8 and registry.match("m", trunk) == 4


def test_an_ancestor_counts_as_used_with_its_last_descendant() -> None:
    forest, registry = registry_of(6)
    root = forest.new_root()
    forest.retain(root)
    forest.extend(root, 0, 12)
    store(registry, forest.spans(root, 8), 0.0)
    other = line(forest, 2)
    store(registry, other, 1.0)
    branch = forest.spans(forest.extend(root, 4, 12), 12)
    store(registry, branch, 2.0)
    pin = registry.pin("m", other, 8)
    store(registry, line(forest, 3), 3.0)
    registry.unpin(pin)
    assert (registry.match("m", branch), registry.match("m", other)) == (4, 8), "the branch had to go first"
    store(registry, line(forest, 1), 4.0)
    assert (registry.match("m", branch), registry.match("m", other)) == (4, 4)


def test_what_was_known_of_evicted_blocks_is_forgotten() -> None:
    forest, registry = registry_of(4, ranks=2)
    registry.register("m", "recurrent", PAGE)
    spans = line(forest, 4)
    node = spans[0][0]
    torn = registry.checkpoint("m", spans, 1, 0.0)
    assert torn is not None
    registry.commit(torn, 0, state_complete=False)
    registry.commit(torn, 1)
    ticket = registry.checkpoint("m", line(forest, 2), 1, 1.0)
    assert ticket is not None
    registry.abort(ticket)
    again = registry.checkpoint("m", spans, 1, 2.0)
    assert again is not None and again.parts == ((node, 2, 2),)
    registry.commit_all(again)
    assert registry.match("m", spans) == 16
    assert registry.match("m", forest.spans(node, 8)) == 0, "the first two pages have no complete state still"


def test_eviction_spares_leased_sessions_unless_nothing_else_is_left() -> None:
    forest, registry = registry_of(6)
    leased, other = line(forest, 3), line(forest, 3)
    store(registry, leased, 0.0, owner="leased")
    store(registry, other, 1.0, owner="other")
    registry.protected.add("leased")
    store(registry, line(forest, 2), 2.0)
    assert (registry.match("m", leased), registry.match("m", other)) == (12, 4)
    store(registry, line(forest, 5), 3.0)
    assert (registry.match("m", leased), registry.match("m", other)) == (4, 0)


def test_an_expired_lease_no_longer_spares_its_session() -> None:
    forest, registry = registry_of(6)
    leased, other = line(forest, 3), line(forest, 3)
    store(registry, leased, 0.0, owner="leased")
    store(registry, other, 1.0, owner="other")
    registry.protected.add("leased")
    registry.protected.discard("leased")
    store(registry, line(forest, 2), 2.0)
    assert (registry.match("m", leased), registry.match("m", other)) == (4, 12)


def test_a_checkpoint_without_room_changes_nothing() -> None:
    forest, registry = registry_of(4)
    kept = line(forest, 2)
    store(registry, kept, 0.0)
    assert registry.checkpoint("m", line(forest, 5), 1, 1.0) is None
    assert (registry.evictions, registry.match("m", kept)) == (0, 8)


def test_a_longer_checkpoint_does_not_evict_its_own_prefix() -> None:
    forest, registry = registry_of(4)
    node = forest.new_root()
    forest.extend(node, 0, 12)
    store(registry, forest.spans(node, 12), 0.0)
    forest.extend(node, 12, 20)
    assert registry.checkpoint("m", forest.spans(node, 20), 1, 1.0) is None
    assert registry.match("m", forest.spans(node, 20)) == 12


def test_models_with_larger_pages_take_more_of_the_same_budget() -> None:
    forest, registry = registry_of(6)
    small = line(forest, 4)
    store(registry, small, 0.0, model="small")
    registry.register("large", "mla")
    ticket = registry.checkpoint("large", line(forest, 1), 4, 1.0)
    assert ticket is not None and ticket.bytes == 16
    assert (registry.used_bytes, registry.match("small", small)) == (24, 8)


def test_impossible_sizes_are_refused() -> None:
    for options in ({"ranks": 0}, {"page_tokens": 0}):
        with pytest.raises(ValueError, match="capacity_bytes=1"):
            HostRegistry(1, **options)  # type: ignore[arg-type]
