"""Which path of the prefix forest a page belongs to, by the cumulative hash that is its name on engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from talaria.substrate.prefix import PrefixForest, Spans

Digest = bytes


class Found(NamedTuple):
    first_page: int
    """Of the digests that were asked for: so many pages lie before them."""
    spans: Spans
    """The path, from its root to the last page that is known. Counts are in pages."""


class Paths:
    """Sequences of page digests of any number of models. Nodes that the forest has dropped are forgotten."""

    def __init__(self, forest: PrefixForest) -> None:
        self._forest = forest
        self._places: dict[tuple[str, Digest], tuple[int, int]] = {}
        """(model, digest) → node and page: equal digests mean equal paths."""
        self._keys: dict[int, list[tuple[str, Digest]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def insert(self, model: str, chain: Sequence[Digest]) -> Spans:
        """The path of a whole prompt, made as far as it is not known."""
        at = len(chain)
        while at and (place := self._place(model, chain[at - 1])) is None:
            at -= 1
        forest = self._forest
        node = place[0] if at and place is not None else forest.new_root()
        if at < len(chain):
            node = forest.extend(node, at, len(chain))
            keys = self._keys.setdefault(node, [])
            for page in range(at, len(chain)):
                key = (model, chain[page])
                keys.append(key)
                self._places[key] = (node, page)
            self._forget_dropped()
        return forest.spans(node, len(chain))

    def find(self, model: str, digests: Sequence[Digest]) -> Found | None:
        """The path of a prompt whose pages from somewhere on are ``digests``, as far as it is known; None if the first is not."""
        first = self._place(model, digests[0]) if digests else None
        if first is None:
            return None
        last = next(place for digest in reversed(digests) if (place := self._place(model, digest)) is not None)
        return Found(first[1], self._forest.spans(last[0], last[1] + 1))

    def let_go(self, spans: Spans) -> None:
        """Drop the path's last node if nothing keeps it."""
        node = spans[-1][0]
        self._forest.retain(node)
        self._forest.release(node)

    def _place(self, model: str, digest: Digest) -> tuple[int, int] | None:
        place = self._places.get((model, digest))
        return place if place is not None and place[0] in self._forest else None

    def _forget_dropped(self) -> None:
        if len(self._keys) > 2 * len(self._forest) + 64:
            for node in [node for node in self._keys if node not in self._forest]:
                for key in self._keys.pop(node):
                    if self._places.get(key, (node, 0))[0] == node:
                        self._places.pop(key, None)
