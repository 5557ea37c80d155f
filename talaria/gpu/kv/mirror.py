"""An engine's device-resident prefixes, kept from its KV events."""

from __future__ import annotations

from collections.abc import Iterable

from talaria.gpu.kv.hashes import PageChain


class KvMirror:
    """The set of pages (by hash) in one engine's prefix cache."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.version = 0
        """Rises with every change."""
        self._pages: set[int] = set()
        self._deaf = False

    def __len__(self) -> int:
        return len(self._pages)

    def stored(self, hashes: Iterable[int]) -> None:
        if not self._deaf:
            self._pages.update(hashes)
            self.version += 1

    def removed(self, hashes: Iterable[int]) -> None:
        if not self._deaf:
            self._pages.difference_update(hashes)
            self.version += 1

    def cleared(self) -> None:
        """The engine says that its cache is empty."""
        self._pages.clear()
        self._deaf = False
        self.version += 1

    def flushed(self) -> None:
        """We flushed the engine, which is paused and will say so only when it goes on: until then, events are older than the flush."""
        self.cleared()
        self._deaf = True

    def device_tokens(self, prompt: PageChain) -> int:
        """Tokens of the prompt that the engine would find on the device now. At least its last token is always computed.

        Looks on from where the last look at the prompt ended: an engine keeps no page without those before it.
        """
        pages, names, at = self._pages, prompt.hashes, prompt.seen_pages
        while at and names[at - 1] not in pages:
            at -= 1
        while at < len(names) and names[at] in pages:
            at += 1
        prompt.seen_pages = at
        return max(0, min(at, (prompt.tokens - 1) // self.page_tokens) * self.page_tokens)
