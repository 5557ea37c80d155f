"""A lean HTTP/1.1 server: kept connections, bodies of known length, and answers that are written when there is something to say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast

LARGEST_HEAD_BYTES = 65_536
LARGEST_BODY_BYTES = 64 * 2**20
KEEP_ALIVE_S = 5.0
"""As uvicorn has it: a pooled connection may close just when it is used."""
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    """By name in lower case."""
    body: bytes


class Answering(Protocol):
    """Whoever answers a request, for as long as that takes."""

    def left(self) -> None:
        """Its client is gone."""


class Connection(asyncio.Protocol):
    """One request at a time: ``handle`` answers at once, or returns who will."""

    def __init__(self, open_ones: set[Connection], handle: Callable[[Request, Connection], Answering | None]) -> None:
        self._open, self._handle = open_ones, handle
        self._transport: asyncio.Transport | None = None
        self._read = b""
        self._answering: Answering | None = None
        self._busy = self._last = False
        """A request is being answered; it is the last one here."""
        self.since_s = time.monotonic()
        """Of its last answer."""

    @property
    def idle(self) -> bool:
        return not self._busy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self._answering is not None:
            self._answering.left()

    def data_received(self, data: bytes) -> None:
        self._read = self._read + data if self._read else data
        self._next()

    def _next(self) -> None:
        while self._read and not self._busy:
            try:
                request = self._request()
            except ValueError:
                self.answer(400, b"no HTTP", kind="text/plain", last=True)
                return
            if request is None:
                return
            self._busy = True
            answering = self._handle(request, self)
            self._answering = answering if self._busy else None

    def _request(self) -> Request | None:
        """The next one, once all of it is there. Raises ValueError for what is none."""
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            if len(self._read) > LARGEST_HEAD_BYTES:
                raise ValueError("a head without end")
            return None
        first, *lines = self._read[:end].decode("latin-1").split("\r\n")
        method, target, version = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", "0"))
        if "transfer-encoding" in headers or not 0 <= length <= LARGEST_BODY_BYTES:
            raise ValueError("a body of unknown length, or too long")
        start = end + 4
        if len(self._read) < start + length:
            return None
        body, self._read = self._read[start : start + length], self._read[start + length :]
        self._last = version != "HTTP/1.1" or headers.get("connection", "").lower() == "close"
        return Request(method, target.partition("?")[0], headers, body)

    # --- answers --------------------------------------------------------------------------------------------------------

    def answer(self, status: int, body: bytes = b"", *, kind: str = "application/json", last: bool = False) -> None:
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._last |= last
        self._write(head.encode() + body)
        self._over()

    def begin(self, data: bytes) -> None:
        """A stream and what of it is there."""
        self._write(_STREAM_HEAD + (_chunk(data) if data else b""))

    def more(self, data: bytes) -> None:
        self._write(_chunk(data))

    def end(self, data: bytes) -> None:
        """The last of a stream, if there is more of it."""
        self._write((_chunk(data) if data else b"") + b"0\r\n\r\n")
        self._over()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _over(self) -> None:
        assert self._transport is not None
        self._busy, self._answering, self.since_s = False, None, time.monotonic()
        if self._last:
            self._transport.close()
        elif self._read:
            asyncio.get_running_loop().call_soon(self._next)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def sweep(connections: set[Connection]) -> None:
    """Close what has been idle for too long, until cancelled."""
    while True:
        await asyncio.sleep(KEEP_ALIVE_S / 5)
        now_s = time.monotonic()
        for connection in [each for each in connections if each.idle and now_s - each.since_s > KEEP_ALIVE_S]:
            connection.close()
