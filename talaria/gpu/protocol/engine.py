"""Between an instance agent and the plugin in an engine's own HTTP process, over a Unix socket on which the agent listens.

The agent posts a client's request to the engine's ordinary endpoint at once, with ``CALL_HEADER``. The engine renders and
tokenises it; the plugin then holds the call (``Held``) until the agent grants it decode steps (``Grant``), runs one segment,
and holds it again (``Ended`` with reason ``grant``, or ``stopped`` after a ``Stop``) until the next. So admission is the
agent's, and every template, parser and stream format is the engine's own.

A frame is a length (4 bytes, big endian) and a message in MessagePack. Either side closes the connection on a frame that it
cannot read. One connection per engine; the plugin connects, says ``Hello``, and tries again after a loss, which ends every
call it holds.
"""

from __future__ import annotations

from typing import Final

import msgspec

ABI: Final = 4
"""Version of this protocol and of the hooks behind it; an agent refuses any other."""
CALL_HEADER: Final = "x-talaria-call"
"""Carries ``call_id(number)``. A request without it passes through the plugin untouched."""
SOCKET_VARIABLE: Final = "TALARIA_AGENT_SOCKET"
"""Environment variable with the socket's path; without it the plugin holds nothing."""
MODEL_VARIABLE: Final = "TALARIA_MODEL"
"""Environment variable with the model's served name."""
LONGEST_FRAME_BYTES: Final = 64 * 2**20
HELD_AGAIN: Final = ("grant", "stopped")
"""Reasons for which a segment ends that are not the end of its call."""


def call_id(number: int) -> str:
    """The engine's request id of a call. Fixed width: an abort matches ids by prefix."""
    return f"talaria-{number:016x}"


def call_number(call: str) -> int:
    """The ``number`` of a ``call_id``."""
    return int(call[-16:], 16)


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Hello(_Message, frozen=True):
    """First message of a connection."""

    abi: int
    model: str
    pid: int
    page_tokens: int
    kv_tokens: int
    """Size of the engine's KV pool."""
    max_running: int
    context_tokens: int
    """Longest prompt plus output that the model takes."""


class Held(_Message, frozen=True):
    """A call is rendered, tokenised and valid; it waits for its first grant."""

    call: str
    prompt: bytes
    """Token ids as uint32, little endian."""
    max_tokens: int
    """Most output tokens that the client allows."""


class Progress(_Message, frozen=True):
    """Output tokens of the call so far, over all segments. The first one of a call is its first token."""

    call: str
    output_tokens: int


class Ended(_Message, frozen=True):
    """A segment is over. After ``Held`` exactly one of them is no ``HELD_AGAIN``: the call's last word, after a ``Drop`` too.

    ``reason``: ``finished`` (end of sequence, stop or the client's limit), ``grant`` (more to come: held again), ``stopped`` (so too, by a
    ``Stop`` before the grant's end), ``aborted`` (its client went away), ``failed`` (``why``; the client gets an error).
    """

    call: str
    reason: str
    output_tokens: int
    """Of the call so far."""
    tokens: bytes
    """This segment's output ids as uint32, little endian."""
    cached_tokens: int
    """Of this segment's input: found on the device."""
    why: str = ""
    host_tokens: int = 0
    """Of this segment's input: brought back from the host."""


class Grant(_Message, frozen=True):
    """Run the next segment: at most ``steps`` decode steps, after the prefill, which gives the first token of a call.

    So the first segment has at most 1 + ``steps`` tokens. A later one has ``steps``: its prefill, of all there is, gives the first of them.
    """

    call: str
    steps: int


class Stop(_Message, frozen=True):
    """End the running segment after the token that is being computed; nothing happens where none runs. What is generated stays."""

    call: str


class Drop(_Message, frozen=True):
    """End the call, held or running: its client gets ``status`` with ``why``, in the endpoint's own error format."""

    call: str
    status: int
    why: str


FromEngine = Hello | Held | Progress | Ended
ToEngine = Grant | Stop | Drop

_encoder = msgspec.msgpack.Encoder()


def frame(message: _Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body
