"""Between the ranks of an instance's engines and the agent that keeps their arenas, over a Unix socket on which the agent listens.

Either side sends frames: a length (4 bytes, big endian) and a message in MessagePack. Descriptors that belong to a message come with its
first byte. A connection is one rank of one engine, which no other follows. Every rank number has an arena of its own, which one model at
a time has behind its window: from its ``Take`` to its ``Park``, or to the end of the process that connected.
"""

from __future__ import annotations

from typing import Final

import msgspec

SOCKET_VARIABLE: Final = "TALARIA_ARENA_SOCKET"
"""Environment variable with the socket's path; without it an engine's memory is its own."""
LONGEST_FRAME_BYTES: Final = 16 * 2**20
MOST_DESCRIPTORS: Final = 200
"""With one message; the kernel takes 253."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Attach(_Message, frozen=True):
    """First message of a rank."""

    pid: int
    rank: int
    ranks: int
    model: str


class Chunks(_Message, frozen=True):
    """The next ``count`` chunks of the arena, a descriptor each: from the rank that has made them, to those that come later."""

    count: int


class Take(_Message, frozen=True):
    """The rank wants to show the arena; answered once nobody else does."""

    number: int


class Keep(_Message, frozen=True):
    """The rank's weights as they lie in its window: host memory behind one descriptor. They stay as they are."""

    nbytes: int


class Timed(_Message, frozen=True):
    """The rank's part of a switch to its model (SPEC §5.4): phases 2 to 5, and what they moved."""

    phases_s: tuple[float, float, float, float]
    path: str
    d2d_bytes: int
    h2d_bytes: int
    dirty_bytes: int


class Park(_Message, frozen=True):
    """The rank has let go of the arena, where these chunks hold weights of ``model``, if any."""

    model: str
    staged: dict[int, int]
    """Chunk of the weights → chunk of the arena."""
    dirty_bytes: int
    teardown_s: float
    """Phase 1 of the switch."""


class Staged(_Message, frozen=True):
    """How far the staging of ``model`` has come on this rank."""

    model: str
    weight_bytes: int
    clean_bytes: int
    dirty_bytes: int
    slack_bytes: int
    copied_bytes: int
    """Since the staging of the model began."""
    copying_s: float


class Welcome(_Message, frozen=True):
    """The arena of this rank."""

    chunks: int
    chunk_bytes: int
    made: bool
    """Its chunks follow; else the rank makes them and sends them."""
    check: bool
    """At every switch fill KV with what is no number, and compare the weights with their image."""
    image_bytes: int
    """Of the rank's weights that an earlier engine of its model has kept, whose descriptor comes along; 0: there are none."""


class Refused(_Message, frozen=True):
    why: str


class Taken(_Message, frozen=True):
    """The arena is the rank's, with these of its weights in it."""

    number: int
    staged: dict[int, int]
    dirty_bytes: int


class Stage(_Message, frozen=True):
    """Stage ``model``, whose weights' descriptor comes along, from now on; with an empty name and no descriptor: nothing."""

    model: str
    nbytes: int
    bytes_per_s: float


FromRank = Attach | Chunks | Take | Park | Keep | Timed | Staged
ToRank = Welcome | Refused | Chunks | Taken | Stage
Message = FromRank | ToRank

_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body
