"""SGLang's names for pages of KV: a hash of all tokens up to the page's end.

A page's digest is SHA-256 over the digest of the page before it (nothing for the first) and its tokens as uint32, little endian. Its
name in KV events is the digest's first 8 bytes as a signed big-endian integer. A last page that is not full has none.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

TOKEN_BYTES: Final = 4
_NAME: Final = struct.Struct(">q24x")
"""In a digest."""


class PageChain:
    """The pages of one token sequence, hashed as it grows. Tokens are uint32, little endian, as the protocols carry them."""

    def __init__(self, page_tokens: int, tokens: bytes = b"") -> None:
        self.page_tokens = page_tokens
        self.tokens = 0
        self.hashes: list[int] = []
        """One per full page."""
        self.seen_pages = 0
        """How many of them were on the device when somebody looked last (``KvMirror``)."""
        self._digest = b""
        self._rest = b""
        self.extend(tokens)

    def extend(self, tokens: bytes) -> None:
        """Append tokens. Takes about half a microsecond a page, and as much for 100 tokens."""
        self.tokens += len(tokens) // TOKEN_BYTES
        data = self._rest + tokens
        page_bytes = self.page_tokens * TOKEN_BYTES
        full = len(data) - len(data) % page_bytes
        digest, digests, sha256 = self._digest, [], hashlib.sha256
        for at in range(0, full, page_bytes):
            digest = sha256(digest + data[at : at + page_bytes]).digest()
            digests.append(digest)
        self.hashes += [name for (name,) in _NAME.iter_unpack(b"".join(digests))]
        self._digest = digest
        self._rest = data[full:]

    def copy(self) -> PageChain:
        """The same sequence so far, to be continued differently."""
        other = PageChain(self.page_tokens)
        other.tokens, other.hashes, other._digest, other._rest = self.tokens, self.hashes.copy(), self._digest, self._rest
        other.seen_pages = self.seen_pages
        return other
