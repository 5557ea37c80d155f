"""SGLang's names for pages of KV: a hash of all tokens up to the page's end.

A page's digest is SHA-256 over the digest of the page before it (nothing for the first) and its tokens as uint32, little endian. Its
name in KV events is the digest's first 8 bytes as a signed big-endian integer. A last page that is not full has none.
"""

from __future__ import annotations

import hashlib
from typing import Final

TOKEN_BYTES: Final = 4


class PageChain:
    """The pages of one token sequence, hashed as it grows. Tokens are uint32, little endian, as the protocols carry them."""

    def __init__(self, page_tokens: int, tokens: bytes = b"") -> None:
        self.page_tokens = page_tokens
        self.tokens = 0
        self.hashes: list[int] = []
        """One per full page."""
        self._digest = b""
        self._rest = b""
        self.extend(tokens)

    def extend(self, tokens: bytes) -> None:
        """Append tokens. Takes about 1 µs a page."""
        self.tokens += len(tokens) // TOKEN_BYTES
        data = memoryview(self._rest + tokens)
        page_bytes = self.page_tokens * TOKEN_BYTES
        digest, hashes, sha256 = self._digest, self.hashes, hashlib.sha256
        full = len(data) - len(data) % page_bytes
        for at in range(0, full, page_bytes):
            page = sha256(digest)
            page.update(data[at : at + page_bytes])
            digest = page.digest()
            hashes.append(int.from_bytes(digest[:8], "big", signed=True))
        self._digest = digest
        self._rest = bytes(data[full:])

    def copy(self) -> PageChain:
        """The same sequence so far, to be continued differently."""
        other = PageChain(self.page_tokens)
        other.tokens, other.hashes, other._digest, other._rest = self.tokens, self.hashes.copy(), self._digest, self._rest
        return other
