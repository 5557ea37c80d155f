"""A prefix forest beside the token content that it stands for, as the oracle of everything keyed by node ids."""

from __future__ import annotations

from itertools import count

from talaria.substrate.prefix import PrefixForest, Spans


class Contents:
    """Grows a forest and keeps every path as a list of tokens; tokens are unique where content is new."""

    def __init__(self) -> None:
        self.forest = PrefixForest()
        self.paths: dict[int, list[int]] = {}
        self._fresh = count(1)

    @property
    def nodes(self) -> list[int]:
        return sorted(self.paths)

    def root(self) -> int:
        node = self.forest.new_root()
        self.paths[node] = []
        return node

    def extend(self, node: int, at_tokens: int, to_tokens: int) -> int:
        path = self.paths[node][:at_tokens] + [next(self._fresh) for _ in range(to_tokens - at_tokens)]
        grown = self.forest.extend(node, at_tokens, to_tokens)
        self.paths[grown] = path
        return grown

    def read(self, spans: Spans) -> list[int]:
        """The tokens that spans stand for."""
        return [token for node, start, end in spans for token in self.paths[node][start:end]]

    def full_page_keys(self, node: int, tokens: int, page_tokens: int) -> list[tuple[int, ...]]:
        """What identifies each full page of a path: everything up to its end."""
        path = self.paths[node][:tokens]
        return [tuple(path[: (page + 1) * page_tokens]) for page in range(tokens // page_tokens)]
