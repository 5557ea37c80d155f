"""Rendered prompts are encoded piece by piece, and a piece seen before is not encoded again.

A call of a line repeats the text of the calls before it, up to the last special token and further. A tokenizer splits a text at its
special (added) tokens first and encodes what is between them independently; so pieces that end with one may be kept by their text.
The ids are those of encoding the whole text; where a tokenizer does not allow this, the whole text is encoded as ever.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from talaria.gpu import compat, seams

CACHE_BYTES: Final = 512 * 2**20
_PIECE_CHARS: Final = 64
"""Shorter pieces are joined with the next: a cache entry costs more than encoding them."""


class PieceCache:
    """Ids by text, the least recently used forgotten first. Threads share it."""

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self.bytes = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, cuts: compat.Cuts, text: str) -> list[int]:
        """The ids of ``text`` without what a post-processor would add."""
        pieces = _pieces(text, cuts.spans(text))
        found = self._find(pieces)
        missing = list(dict.fromkeys(piece for piece in pieces if piece not in found))
        if missing:
            encoded = cuts.backend.encode_batch(missing, add_special_tokens=False)
            new = {piece: array("I", encoding.ids) for piece, encoding in zip(missing, encoded, strict=True)}
            self._keep(new)
            found.update(new)
        ids: array[int] = array("I")
        for piece in pieces:
            ids += found[piece]
        return ids.tolist()

    def _find(self, pieces: list[str]) -> dict[str, array[int]]:
        with self._lock:
            found = {piece: ids for piece in pieces if (ids := self._ids.get(piece)) is not None}
            for piece in found:
                self._ids.move_to_end(piece)
        return found

    def _keep(self, new: dict[str, array[int]]) -> None:
        with self._lock:
            for piece, ids in new.items():
                if piece not in self._ids:
                    self._ids[piece] = ids
                    self.bytes += _size_bytes(piece, ids)
            while self.bytes > self._capacity_bytes:
                self.bytes -= _size_bytes(*self._ids.popitem(last=False))


def _size_bytes(piece: str, ids: array[int]) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids)


def _pieces(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """``text`` cut behind special tokens."""
    pieces, start = [], 0
    for _, end in spans:
        if end - start >= _PIECE_CHARS:
            pieces.append(text[start:end])
            start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


_cache = PieceCache()


def _encode(
    original: Callable[..., list[int]], tokenizer: Any, text: Any, encode_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """In place of SGLang's encoder of rendered prompts."""
    options = encode_kwargs or {}
    if isinstance(text, str) and not set(options) - {"add_special_tokens"}:
        cuts = compat.cuts(tokenizer)
        if cuts is not None and not (cuts.adds_specials and options.get("add_special_tokens", True)):
            return _cache.encode(cuts, text)
    return original(tokenizer, text, encode_kwargs)


HOOKS: Final = (compat.Hook(seams.ENCODE, "around", _encode),)
