"""What two prompts share: a forest of append-only token sequences with branches, and hashes where there are bytes.

A prompt is a *path*: the first n tokens of a node's sequence, ancestors included. Caches are keyed by node ids and
token ranges, so that the identity of a 100K-token prefix is a tuple of a few spans.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

Span = tuple[int, int, int]
"""(node, start, end): tokens [start, end) of a path, which ``node`` holds."""
Spans = tuple[Span, ...]
"""A whole path, root first, without empty spans."""


class _Node:
    __slots__ = ("above", "children", "end", "parent", "references", "start")

    def __init__(self, parent: int | None, above: Spans, start: int) -> None:
        self.parent = parent
        self.above = above
        """The path up to ``start``: fixed for good, since sequences only grow at their ends."""
        self.start = start
        self.end = start
        self.children = 0
        self.references = 0


class PrefixForest:
    """Token sequences that share prefixes; only lengths are kept. Node ids are never used again.

    A node starts unreferenced. It is dropped by the ``release`` that takes its last reference, or later with its
    last child; so memory follows the sessions and caches that hold references.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def _add(self, parent: int | None, above: Spans, start: int) -> int:
        node = self._next
        self._next += 1
        self._nodes[node] = _Node(parent, above, start)
        if parent is not None:
            self._nodes[parent].children += 1
        return node

    def new_root(self) -> int:
        """A new sequence of 0 tokens that shares nothing with any other."""
        return self._add(None, (), 0)

    def end(self, node: int) -> int:
        """Length of the node's path in tokens."""
        return self._nodes[node].end

    def extend(self, node: int, at_tokens: int, to_tokens: int) -> int:
        """The first ``at_tokens`` of ``node``'s path, followed by new content up to ``to_tokens``.

        Grows ``node`` in place and returns it if ``at_tokens`` is its end; otherwise returns a new child of the
        ancestor that holds the token before the branch. Raises ValueError unless at <= end(node) and at <= to.
        """
        item = self._nodes[node]
        if not 0 <= at_tokens <= item.end or to_tokens < at_tokens:
            raise ValueError(f"cannot extend a path of {item.end} tokens at {at_tokens} to {to_tokens}")
        if at_tokens == item.end:
            item.end = to_tokens
            return node
        while at_tokens <= item.start and item.parent is not None:
            node, item = item.parent, self._nodes[item.parent]
        child = self._add(node, self.spans(node, at_tokens), at_tokens)
        self._nodes[child].end = to_tokens
        return child

    def spans(self, node: int, tokens: int) -> Spans:
        """The path of the first ``tokens`` of ``node``, root first. Raises ValueError beyond its end."""
        item = self._nodes[node]
        if tokens > item.start:
            if tokens > item.end:
                raise ValueError(f"{tokens} tokens asked for of a path of {item.end}")
            return (*item.above, (node, item.start, tokens))
        return tuple((owner, start, min(end, tokens)) for owner, start, end in item.above if start < tokens)

    def common(self, a: int, b: int) -> int:
        """Tokens that the paths of two nodes are known to share."""
        if a == b:
            return self._nodes[a].end
        shared = 0
        for (node_a, _, end_a), (node_b, _, end_b) in zip(self.spans(a, self.end(a)), self.spans(b, self.end(b)), strict=False):
            if node_a != node_b:
                break
            shared = min(end_a, end_b)
            if end_a != end_b:
                break
        return shared

    def retain(self, node: int) -> None:
        self._nodes[node].references += 1

    def release(self, node: int) -> None:
        """Undo one ``retain``; drops what nothing holds any more. Raises ValueError without a matching retain."""
        item = self._nodes[node]
        if item.references <= 0:
            raise ValueError(f"node {node} is not retained")
        item.references -= 1
        while item.references == 0 and item.children == 0:
            del self._nodes[node]
            if item.parent is None:
                return
            node, item = item.parent, self._nodes[item.parent]
            item.children -= 1


def page_hashes(tokens: Sequence[int], page_tokens: int, previous: bytes = b"") -> list[bytes]:
    """Cumulative SHA-256 of each full page: digest(previous digest + the page's tokens as uint32 little-endian).

    Equal hashes mean equal prefixes up to there, so they are the prefix identity on hardware (SPEC §5.2). Pass the
    last hash as ``previous`` to go on from a page boundary. Raises ValueError for a token that is no uint32.
    """
    if page_tokens <= 0:
        raise ValueError(f"page_tokens={page_tokens}: allowed 1 or more")
    pages = len(tokens) // page_tokens
    try:
        words = array("I", tokens[: pages * page_tokens])
    except (OverflowError, TypeError) as error:
        raise ValueError("a token id is not an unsigned 32-bit integer") from error
    if sys.byteorder == "big":
        words.byteswap()
    raw, page_bytes, hashes = words.tobytes(), 4 * page_tokens, []
    for page in range(pages):
        previous = hashlib.sha256(previous + raw[page * page_bytes : (page + 1) * page_bytes]).digest()
        hashes.append(previous)
    return hashes


def common_prefix(a: tuple[int, ...], b: tuple[int, ...], start: int = 0) -> int:
    """Length of the common prefix of two tuples that agree up to ``start``; compares slices, so it runs at C speed."""
    high = min(len(a), len(b))
    if a[start:high] == b[start:high]:
        return high
    low = start
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class BlockIndex:
    """Finds the path of a prompt that is known by the content hashes of its full blocks, across sessions.

    ``blocks`` is always the whole prompt's tuple. Nodes that the forest has dropped are forgotten.
    """

    _ROOT = -1

    def __init__(self, forest: PrefixForest, block_tokens: int) -> None:
        if block_tokens <= 0:
            raise ValueError(f"block_tokens={block_tokens}: allowed 1 or more")
        self._forest = forest
        self._block_tokens = block_tokens
        self._blocks: dict[int, tuple[int, ...]] = {}
        """node → the hashes of its path."""
        self._next: dict[tuple[int, int, int], int] = {}
        """(node, index of the first block that is not its own, that block's hash) → the node that goes on."""

    def __len__(self) -> int:
        return len(self._blocks)

    def locate(self, blocks: tuple[int, ...]) -> tuple[int | None, int]:
        """The longest known prefix of a prompt as (node, tokens); (None, 0) if not even its first block is known."""
        at, node, matched = self._ROOT, None, 0
        while matched < len(blocks):
            child = self._next.get((at, matched, blocks[matched]))
            if child is None or child not in self._forest:
                break
            matched = common_prefix(self._blocks[child], blocks, matched)
            at = node = child
        return node, matched * self._block_tokens

    def insert(self, blocks: tuple[int, ...], prompt_tokens: int, base: tuple[int, int] | None = None) -> int:
        """A node whose path's first ``prompt_tokens`` are this prompt; it shares what ``locate`` finds.

        ``base`` = (node, tokens) is a prefix that the caller knows of otherwise (the line's previous prompt and
        response, which ends inside a block): it is used where it reaches further and no hash contradicts it.
        Raises ValueError if the blocks are longer than the prompt.
        """
        if len(blocks) * self._block_tokens > prompt_tokens:
            raise ValueError(f"{len(blocks)} blocks of {self._block_tokens} tokens in a prompt of {prompt_tokens}")
        located, located_tokens = self.locate(blocks)
        node, tokens = located, located_tokens
        if base is not None and base[1] >= located_tokens and self._consistent(blocks, base):
            node, tokens = base[0], min(base[1], prompt_tokens)
        if node is None:
            grown = self._forest.extend(self._forest.new_root(), 0, prompt_tokens)
        elif tokens == prompt_tokens:
            return node
        else:
            grown = self._forest.extend(node, tokens, prompt_tokens)
        first_new = located_tokens // self._block_tokens
        if first_new < len(blocks):
            self._blocks[grown] = blocks
            if grown != located:
                self._next[(self._ROOT if located is None else located, first_new, blocks[first_new])] = grown
            self._forget_dropped()
        return grown

    def _consistent(self, blocks: tuple[int, ...], base: tuple[int, int]) -> bool:
        known = self._blocks.get(base[0], ())
        shared = min(len(known), len(blocks), base[1] // self._block_tokens)
        return known[:shared] == blocks[:shared]

    def _forget_dropped(self) -> None:
        if len(self._blocks) > 2 * len(self._forest) + 64:
            forest = self._forest
            self._blocks = {node: blocks for node, blocks in self._blocks.items() if node in forest}
            self._next = {key: node for key, node in self._next.items() if node in forest}
