"""The prefix cache by pages, and the events that SGLang publishes of it over ZeroMQ."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict, deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.gpu.stub.text import TOKEN_BYTES

KEPT_BATCHES = 10_000
PUBLISH_S = 0.001
"""After the first of a batch."""


def event_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


class Publisher:
    """KV events in SGLang's format, and the last of them again for who asks; silent where no endpoint is configured."""

    def __init__(self, config: dict[str, str]) -> None:
        self._sequence = 0
        self._unsent: list[dict[str, Any]] = []
        self._topic = config.get("topic", "").encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._socket: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        if config.get("publisher") == "zmq":
            self._socket = zmq.Context.instance().socket(zmq.PUB)
            self._socket.set_hwm(100_000)
            self._socket.bind(config["endpoint"])
        if "replay_endpoint" in config:
            self._replay = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
            self._replay.bind(config["replay_endpoint"])

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Soon, in order: no token waits for it."""
        if self._socket is not None and events:
            if not self._unsent:
                asyncio.get_running_loop().call_later(PUBLISH_S, self._send)
            self._unsent += events

    def _send(self) -> None:
        events, self._unsent = self._unsent, []
        if self._socket is not None:
            body = msgspec.msgpack.encode([time.time(), events, 0])
            self._socket.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), body), flags=zmq.NOBLOCK)
            self._kept.append((self._sequence, body))
            self._sequence += 1

    async def replay(self) -> None:
        """Answer all who missed some."""
        while self._replay is not None:
            who, _, first = await self._replay.recv_multipart()
            for number, body in list(self._kept):
                if number >= int.from_bytes(first, "big"):
                    await self._replay.send_multipart((who, b"", self._topic, number.to_bytes(8, "big"), body))
            await self._replay.send_multipart((who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))


class PrefixCache:
    """Pages by digest, oldest use first. A page is used together with all before it, so the oldest is always a leaf.

    ``pages``: a sequence's digests, a chain of SHA-256 over whole pages: each over the digest before it and its tokens as uint32, little
    endian."""

    def __init__(self, page_tokens: int, kv_tokens: int, publisher: Publisher) -> None:
        self._page_tokens, self._capacity = page_tokens, kv_tokens // page_tokens
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self.publisher = publisher

    def extend(self, pages: list[bytes], ids: bytes) -> None:
        """Add the digests of what of ``ids`` is beyond ``pages``."""
        size, digest = self._page_tokens * TOKEN_BYTES, pages[-1] if pages else b""
        for start in range(len(pages) * size, len(ids) - size + 1, size):
            digest = hashlib.sha256(digest + ids[start : start + size]).digest()
            pages.append(digest)

    def cached_tokens(self, pages: list[bytes], tokens: int) -> int:
        """Of an input: found here. At least one token is always computed."""
        return self._known(pages[: (tokens - 1) // self._page_tokens]) * self._page_tokens

    def _known(self, pages: list[bytes]) -> int:
        return next((at for at, digest in enumerate(pages) if digest not in self._pages), len(pages))

    def store(self, pages: list[bytes], ids: bytes) -> None:
        """What has been computed of ``ids``; the pages before are used."""
        chain = pages[: self._capacity]
        known = self._known(chain)
        for digest in reversed(chain):
            self._pages.pop(digest, None)
            self._pages[digest] = None
        evicted = [self._pages.popitem(last=False)[0] for _ in range(len(self._pages) - self._capacity)]
        events: list[dict[str, Any]] = []
        if evicted:
            events.append({"type": "BlockRemoved", "block_hashes": [event_hash(digest) for digest in evicted], "medium": "GPU"})
        if chain[known:]:
            start, end = known * self._page_tokens * TOKEN_BYTES, len(chain) * self._page_tokens * TOKEN_BYTES
            events.append({
                "type": "BlockStored", "block_hashes": [event_hash(digest) for digest in chain[known:]],
                "parent_block_hash": event_hash(chain[known - 1]) if known else None, "token_ids": array("I", ids[start:end]).tolist(),
                "block_size": self._page_tokens, "lora_id": None, "medium": "GPU",
            })  # fmt: skip
        self.publisher.publish(events)

    def clear(self) -> None:
        self._pages.clear()

    def announce_clear(self) -> None:
        self.publisher.publish([{"type": "AllBlocksCleared"}])
