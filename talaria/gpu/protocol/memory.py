"""Between the ranks of an instance's engines and the agent that keeps its host pool, over a Unix socket on which the agent listens.

The agent first sends one byte with the descriptor of the pool. Then either side sends frames: a length (4 bytes, big endian) and a
message in MessagePack. ``number`` ties an answer to its question. Digests are 32 bytes each, page by page; page and slab numbers are
uint32, little endian. A connection is one rank of one engine. When it has ended, the rank does not come back: its engine is started anew.
"""

from __future__ import annotations

from typing import Final

import msgspec

SOCKET_VARIABLE: Final = "TALARIA_MEMORY_SOCKET"
"""Environment variable with the socket's path; without it an engine keeps nothing on the host."""
DIGEST_BYTES: Final = 32
LONGEST_FRAME_BYTES: Final = 64 * 2**20


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Join(_Message, frozen=True):
    """First message of a rank. Everything but ``rank`` makes pages of one engine comparable with another's."""

    rank: int
    ranks: int
    model: str
    revision: str
    dtype: str
    page_tokens: int
    page_bytes: int
    """Of one page on one rank."""
    layers: int
    family: str
    checkpoint_pages: int
    """Spacing of the positions at which recurrent state is saved; 0 for attention."""


class Find(_Message, frozen=True):
    """How many of these pages, which follow what the device holds of a request's prompt, can be restored? They stay until ``Done``."""

    number: int
    request: str
    digests: bytes


class Pin(_Message, frozen=True):
    """The copy of a request's prefix to the device begins."""

    request: str
    pages: int


class Done(_Message, frozen=True):
    """It has ended, or will not take place; not ``complete``: it failed."""

    request: str
    complete: bool = True


class Save(_Message, frozen=True):
    """The device has the pages of this whole path: which of them are to be copied to the pool?"""

    number: int
    digests: bytes


class Saved(_Message, frozen=True):
    """The copies of a ``Save`` have ended."""

    number: int
    complete: bool


class Drain(_Message, frozen=True):
    """No copy of this rank is under way, and the device's prefixes are about to be dropped."""

    number: int


class Welcome(_Message, frozen=True):
    slab_bytes: int
    slabs: int
    """In each rank's partition; partitions follow each other in the order of ranks."""


class Refused(_Message, frozen=True):
    why: str


class Found(_Message, frozen=True):
    number: int
    pages: int
    slabs: bytes


class Granted(_Message, frozen=True):
    number: int
    pages: bytes
    """Places along the path."""
    slabs: bytes
    kept: bool
    """Whether all of the path is in the pool or on its way there."""


class Drained(_Message, frozen=True):
    number: int


FromRank = Join | Find | Pin | Done | Save | Saved | Drain
ToRank = Welcome | Refused | Found | Granted | Drained

_encoder = msgspec.msgpack.Encoder()


def frame(message: _Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def split(digests: bytes) -> list[bytes]:
    """Raises ValueError where they are no whole digests."""
    if len(digests) % DIGEST_BYTES:
        raise ValueError(f"{len(digests)} bytes of digests")
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
