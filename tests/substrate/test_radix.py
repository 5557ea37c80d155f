"""Which node owns a page, and how many objects a long history leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.device import DeviceCache
from talaria.substrate.pages import PagePool
from talaria.substrate.prefix import PrefixForest, Span
from talaria.substrate.radix import page_steps
from talaria.substrate.registry import HostRegistry


def spans_of(lengths: list[int]) -> tuple[Span, ...]:
    spans, at = [], 0
    for node, length in enumerate(lengths):
        spans.append((node, at, at + length))
        at += length
    return tuple(spans)


@given(st.lists(st.integers(1, 12), max_size=6), st.integers(1, 6), st.booleans())
def test_every_page_of_a_path_belongs_to_the_node_of_its_last_token(lengths: list[int], page_tokens: int, partial: bool) -> None:
    spans = spans_of(lengths)
    owner_of = [node for node, start, end in spans for _ in range(start, end)]
    pages = -(-len(owner_of) // page_tokens) if partial else len(owner_of) // page_tokens
    expected = [(owner_of[min((page + 1) * page_tokens, len(owner_of)) - 1], page) for page in range(pages)]
    steps = page_steps(spans, page_tokens, partial=partial)
    assert [(node, page) for node, first, end in steps for page in range(first, end)] == expected
    starts = {node: start // page_tokens for node, start, _ in spans}
    assert all(first == starts[node] for node, first, _ in steps), "a node's first page does not depend on the path"


def test_two_paths_share_exactly_the_pages_within_their_common_prefix() -> None:
    forest = PrefixForest()
    root = forest.new_root()
    forest.extend(root, 0, 100)
    branch = forest.extend(root, 70, 120)
    a = page_steps(forest.spans(root, 100), 32, partial=True)
    b = page_steps(forest.spans(branch, 120), 32, partial=True)
    assert a == [(root, 0, 4)] and b == [(root, 0, 2), (branch, 2, 4)]


def test_memory_follows_the_live_sessions_and_what_the_caches_hold() -> None:
    forest = PrefixForest()
    cache = DeviceCache(PagePool(64), 16, forest)
    registry = HostRegistry(200 * 16, page_tokens=16, forest=forest)
    for session in range(300):
        node = forest.new_root()
        forest.retain(node)
        for turn in range(3):
            forest.extend(node, forest.end(node), forest.end(node) + 50)
            spans = forest.spans(node, forest.end(node))
            assert cache.lock(spans, session + 0.1 * turn)
            cache.release(spans, forest.end(node), session + 0.1 * turn)
            ticket = registry.checkpoint("m", spans, 1, session + 0.1 * turn)
            assert ticket is not None
            registry.commit_all(ticket)
        forest.release(node)
        assert len(forest) <= 200 // 9 + 2, "each session leaves nine pages"


def test_a_line_of_many_turns_stays_one_run_of_pages() -> None:
    forest = PrefixForest()
    cache = DeviceCache(PagePool(10_000), 64, forest)
    registry = HostRegistry(10**9, forest=forest)
    node = forest.new_root()
    for turn in range(187):
        forest.extend(node, forest.end(node), forest.end(node) + 500)
        spans = forest.spans(node, forest.end(node))
        assert len(spans) == 1
        assert cache.lock(spans, turn)
        cache.release(spans, forest.end(node), turn)
        ticket = registry.checkpoint("m", spans, 1, turn)
        assert ticket is not None and len(ticket.parts) == 1
        registry.commit_all(ticket)
    assert cache.pages(node) == ((0, 187 * 500 // 64),)
