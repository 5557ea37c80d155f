"""Prefix identity: the forest against explicit token lists, page hashes against their definition, blocks against both."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.prefix import BlockIndex, PrefixForest, common_prefix, page_hashes
from tests.substrate.content import Contents

STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=25)


def grow(steps: list[tuple[int, int, int]]) -> Contents:
    contents = Contents()
    contents.root()
    for pick, at, more in steps:
        if pick == 0:
            contents.root()
            continue
        node = contents.nodes[pick % len(contents.nodes)]
        at = len(contents.paths[node]) if at > 30 else at % (len(contents.paths[node]) + 1)
        contents.extend(node, at, at + more)
    return contents


@given(STEPS)
def test_spans_cover_a_path_without_gaps_and_stand_for_its_content(steps: list[tuple[int, int, int]]) -> None:
    contents = grow(steps)
    for node in contents.nodes:
        path = contents.paths[node]
        assert contents.forest.end(node) == len(path)
        for tokens in range(len(path) + 1):
            spans = contents.forest.spans(node, tokens)
            assert contents.read(spans) == path[:tokens]
            assert all(start < end for _, start, end in spans)
            assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans)][: len(spans)]


@given(STEPS)
def test_paths_share_exactly_their_longest_common_prefix(steps: list[tuple[int, int, int]]) -> None:
    contents = grow(steps)
    for a in contents.nodes:
        for b in contents.nodes:
            pairs = list(zip(contents.paths[a], contents.paths[b], strict=False))
            shared = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
            assert contents.forest.common(a, b) == shared


def test_extending_at_the_end_grows_in_place_and_earlier_branches() -> None:
    forest = PrefixForest()
    root = forest.new_root()
    assert forest.extend(root, 0, 100) == root
    branch = forest.extend(root, 60, 90)
    assert branch != root and forest.spans(branch, 90) == ((root, 0, 60), (branch, 60, 90))
    deeper = forest.extend(branch, 40, 50)
    assert forest.spans(deeper, 50) == ((root, 0, 40), (deeper, 40, 50))


def test_a_path_cannot_be_extended_or_read_beyond_its_end() -> None:
    forest = PrefixForest()
    root = forest.new_root()
    forest.extend(root, 0, 10)
    for at, to in ((11, 12), (5, 4), (-1, 3)):
        with pytest.raises(ValueError, match="cannot extend"):
            forest.extend(root, at, to)
    with pytest.raises(ValueError, match="11 tokens asked for"):
        forest.spans(root, 11)


def test_a_node_lives_while_a_reference_or_a_child_holds_it() -> None:
    forest = PrefixForest()
    root = forest.new_root()
    forest.retain(root)
    forest.extend(root, 0, 10)
    child = forest.extend(root, 5, 9)
    forest.retain(child)
    forest.release(root)
    assert root in forest, "its child needs it"
    forest.release(child)
    assert len(forest) == 0
    other = forest.new_root()
    assert other not in (root, child), "ids are never used again"
    with pytest.raises(ValueError, match="not retained"):
        forest.release(other)


def test_a_branch_at_the_very_start_of_a_node_does_not_depend_on_that_node() -> None:
    forest = PrefixForest()
    root = forest.new_root()
    forest.extend(root, 0, 10)
    first = forest.extend(root, 5, 8)
    forest.retain(first)
    second = forest.extend(first, 5, 9)
    forest.retain(second)
    forest.release(first)
    assert first not in forest and forest.spans(second, 9) == ((root, 0, 5), (second, 5, 9))


def test_page_hashes_chain_sha256_over_little_endian_tokens_of_full_pages() -> None:
    tokens = list(range(1000, 1011))
    first = hashlib.sha256(struct.pack("<4I", *tokens[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *tokens[4:8])).digest()
    assert page_hashes(tokens, 4) == [first, second]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.integers(0, 5))
def test_page_hashes_can_be_continued_from_any_page_boundary(tokens: list[int], page_tokens: int, pages: int) -> None:
    whole = page_hashes(tokens, page_tokens)
    head = whole[:pages]
    rest = page_hashes(tokens[len(head) * page_tokens :], page_tokens, head[-1] if head else b"")
    assert head + rest == whole


def test_a_token_that_is_no_uint32_is_refused() -> None:
    for token in (-1, 2**32):
        with pytest.raises(ValueError, match="unsigned 32-bit"):
            page_hashes([token], 1)
    with pytest.raises(ValueError, match="page_tokens=0"):
        page_hashes([1], 0)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(0, 12))
def test_a_common_prefix_is_what_a_plain_loop_finds(left: list[int], right: list[int], known: int) -> None:
    shared = _shared(left, right)
    assert common_prefix(tuple(left), tuple(right), min(known, shared)) == shared


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=25))
def test_a_prompt_is_located_up_to_the_longest_prefix_that_any_prompt_shared(prompts: list[list[int]]) -> None:
    forest = PrefixForest()
    index = BlockIndex(forest, 10)
    seen: list[list[int]] = []
    for prompt in prompts:
        shared = max((_shared(prompt, other) for other in seen), default=0)
        node, tokens = index.locate(tuple(prompt))
        assert tokens == 10 * shared and (node is None) == (shared == 0)
        length = 10 * len(prompt) + 3
        inserted = index.insert(tuple(prompt), length)
        forest.retain(inserted)
        assert forest.end(inserted) >= length
        if node is not None:
            assert forest.spans(inserted, tokens) == forest.spans(node, tokens)
        seen.append(prompt)


def _shared(a: list[int], b: list[int]) -> int:
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def test_equal_prefixes_of_different_sessions_share_nodes() -> None:
    forest = PrefixForest()
    index = BlockIndex(forest, 64)
    a = index.insert((1, 2, 3), 200)
    b = index.insert((1, 2, 9), 200)
    assert forest.common(a, b) == 128


def test_a_known_base_lets_a_line_grow_in_place_past_its_response() -> None:
    forest = PrefixForest()
    index = BlockIndex(forest, 64)
    node = index.insert((1, 2), 150)
    forest.extend(node, 150, 180)
    grown = index.insert((1, 2, 3, 4), 300, base=(node, 180))
    assert grown == node
    assert index.locate((1, 2, 3, 4, 5)) == (node, 256)


def test_a_base_that_a_hash_contradicts_is_not_used() -> None:
    forest = PrefixForest()
    index = BlockIndex(forest, 64)
    node = index.insert((1, 2), 150)
    other = index.insert((1, 7, 8), 200, base=(node, 150))
    assert forest.common(node, other) == 64


def test_a_prompt_that_was_seen_whole_needs_no_new_node() -> None:
    forest = PrefixForest()
    index = BlockIndex(forest, 64)
    node = index.insert((1, 2, 3), 192)
    assert index.insert((1, 2), 128) == node and len(forest) == 1


def test_blocks_longer_than_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks of 64 tokens in a prompt of 191"):
        BlockIndex(PrefixForest(), 64).insert((1, 2, 3), 191)


def test_the_index_forgets_what_the_forest_has_dropped() -> None:
    forest = PrefixForest()
    index = BlockIndex(forest, 64)
    for session in range(1000):
        node = index.insert((session, 1), 128)
        forest.retain(node)
        forest.release(node)
    assert len(forest) == 0 and len(index) < 100
    assert index.locate((999, 1)) == (None, 0)
