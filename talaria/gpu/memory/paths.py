"""Which path of the prefix forest a page belongs to, by the cumulative hash that is its name on engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from talaria.substrate.prefix import PrefixForest, Spans

Digest = bytes
_NAME_BYTES: Final = 8


def name_of(digest: Digest) -> int:
    """What KV events call a page (``kv.hashes``)."""
    return int.from_bytes(digest[:_NAME_BYTES], "big", signed=True)


class Found(NamedTuple):
    first_page: int
    """Of the digests that were asked for: so many pages lie before them."""
    spans: Spans
    """The path, from its root to the last page that is known. Counts are in pages."""


class Paths:
    """Sequences of page digests of any number of models. Nodes that the forest has dropped are forgotten."""

    def __init__(self, forest: PrefixForest) -> None:
        self._forest = forest
        self._places: dict[tuple[str, int], tuple[int, int]] = {}
        """(model, name of a page) → node and page. A name says which digest it may be, equal digests mean equal paths."""
        self._digests: dict[int, tuple[str, int, list[Digest]]] = {}
        """Node → its model, the page at which it begins, and its digests from there on."""

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
            own = self._digests.setdefault(node, (model, at, []))[2]
            for page in range(at, len(chain)):
                own.append(chain[page])
                self._places[(model, name_of(chain[page]))] = (node, page)
            self._forget_dropped()
        return forest.spans(node, len(chain))

    def find(self, model: str, digests: Sequence[Digest]) -> Found | None:
        """The path of a prompt whose pages from somewhere on are ``digests``, as far as it is known; None if the first is not."""
        first = self._place(model, digests[0]) if digests else None
        if first is None:
            return None
        last = next(place for digest in reversed(digests) if (place := self._place(model, digest)) is not None)
        return Found(first[1], self._forest.spans(last[0], last[1] + 1))

    def guess(self, model: str, names: Sequence[int]) -> Spans:
        """The path of a prompt by the names of its pages, as far as it is known: good enough for an estimate."""
        known, unknown = 0, len(names) + 1
        while unknown - known > 1:  # whoever knows a page knows those before it
            middle = (known + unknown) // 2
            node, page = self._places.get((model, names[middle - 1]), (-1, -1))
            if page == middle - 1 and node in self._forest:
                known = middle
            else:
                unknown = middle
        return self._forest.spans(self._places[(model, names[known - 1])][0], known) if known else ()

    def let_go(self, spans: Spans) -> None:
        """Drop the path's last node if nothing keeps it."""
        node = spans[-1][0]
        self._forest.retain(node)
        self._forest.release(node)

    def _place(self, model: str, digest: Digest) -> tuple[int, int] | None:
        place = self._places.get((model, name_of(digest)))
        if place is None or place[0] not in self._forest:
            return None
        _, first, digests = self._digests[place[0]]
        return place if digests[place[1] - first] == digest else None

    def _forget_dropped(self) -> None:
        if len(self._digests) > 2 * len(self._forest) + 64:
            for node in [node for node in self._digests if node not in self._forest]:
                model, _, digests = self._digests.pop(node)
                for digest in digests:
                    key = (model, name_of(digest))
                    if self._places.get(key, (-1, 0))[0] == node:
                        del self._places[key]
