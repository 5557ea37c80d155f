"""HTTP/1.1 to our own next process, gateway to agent and agent to engine: kept connections, and bytes handed on as they come.

A chunk goes from one socket to the other in one turn of the event loop, without a task or a future in between: with twenty chunks a
call that is half of what a general client costs.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

LARGEST_HEAD_BYTES: Final = 65_536
LONGEST_LINE_BYTES: Final = 1024
"""Of a chunk's size."""
MOST_UNREAD_BYTES: Final = 262_144
"""Of an answer that nobody reads at the moment; with more the other side waits."""
_HEX: Final = frozenset(b"0123456789abcdefABCDEF")
_STATUS: Final = re.compile("[1-9][0-9]{2}")
_LENGTH: Final = re.compile("[0-9]{1,18}")


class UpstreamFailed(Exception):
    """No answer, or not all of it. ``arrived``: the request may have got there."""

    def __init__(self, why: str, *, arrived: bool) -> None:
        super().__init__(why)
        self.arrived = arrived


class Reply:
    """An answer on its way: to be given to ``Upstream.post``, and to be closed at any time."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By name in lower case."""
        self.complete = self.closed = False
        self._connection: _Connection | None = None
        self._error: BaseException | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """All of the body. Raises UpstreamFailed, as do the others."""
        parts = []
        while part := await self.some():
            parts.append(part)
        return b"".join(parts)

    async def some(self) -> bytes:
        """What has come, or the next that does; empty at the end."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self._wait()
        data = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        self._flow(True)
        return data

    async def pass_to(self, take: Callable[[bytes], bool], drained: Callable[[], Awaitable[None]]) -> None:
        """Hand over the rest as it comes; where ``take`` says False nothing more comes until ``drained``. Raises what ``take`` raises."""
        while data := await self.some():
            self._take = take if take(data) else None
            if self._take is not None and not self.complete and self._error is None:
                await self._wait()
            if self._take is None:
                await drained()
                self._flow(True)

    def close(self) -> None:
        """No more of it is wanted; what has not come yet goes down with its connection."""
        self.closed = True
        if self._connection is not None:
            self._connection.abort()

    # --- the connection's side ---------------------------------------------------------------------------------------

    async def begun(self, connection: _Connection) -> None:
        self._connection = connection
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    def came(self, data: bytes) -> None:
        if self._take is not None:
            try:
                if self._take(data):
                    return
                self._take = None
                self._flow(False)
            except Exception as error:
                self._take, self._error = None, error
            self.wake()
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > MOST_UNREAD_BYTES:
            self._flow(False)
        self.wake()

    def over(self, error: UpstreamFailed | None = None) -> None:
        self._connection, self._error, self.complete = None, self._error or error, error is None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _flow(self, on: bool) -> None:
        if self._connection is not None:
            self._connection.flow(on)


class _Origin(NamedTuple):
    host: str
    port: int
    tls: bool
    path: str
    name: str
    """For the header ``host``."""


@lru_cache(maxsize=256)
def _origin(url: str) -> _Origin:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return _Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"), parts.netloc.rpartition("@")[2])


class Upstream:
    """A pool of connections. One that has been idle for ``idle_s`` is not used again: the other side may be closing it."""

    def __init__(self, idle_s: float, connect_s: float) -> None:
        self._idle_s, self._connect_s = idle_s, connect_s
        self._idle: dict[_Origin, list[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None
        """Made once: reading the system's certificates takes tens of milliseconds."""

    async def post(self, reply: Reply, url: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Until the head of the answer is there. ``path`` as it travels, quoted. Raises UpstreamFailed."""
        origin = _origin(url)
        lines = [f"POST {origin.path}{path} HTTP/1.1\r\nhost: {origin.name}\r\ncontent-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        connection = self._kept(origin) or await self._connect(origin)
        if reply.closed:
            connection.abort()
            raise UpstreamFailed("given up", arrived=False)
        connection.ask(reply, head, body)
        try:
            await reply.begun(connection)
        except BaseException:
            reply.close()
            raise

    def close(self) -> None:
        for connection in tuple(self._open):
            connection.abort()

    def _kept(self, origin: _Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable(self._idle_s):
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: _Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if origin.tls else None
        try:
            async with asyncio.timeout(self._connect_s):
                made = await loop.create_connection(lambda: _Connection(self, origin), origin.host, origin.port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise UpstreamFailed(f"{origin.name} cannot be reached: {error or 'no answer'}", arrived=False) from None
        transport, connection = made
        if transport.is_closing():
            raise UpstreamFailed(f"{origin.name} closes what is opened", arrived=False)
        self._open.add(connection)  # not as soon as it is made: one that is given up then may never be told that it is lost
        return connection

    def free(self, connection: _Connection, origin: _Origin) -> None:
        self._idle.setdefault(origin, []).append(connection)

    def lost(self, connection: _Connection, origin: _Origin) -> None:
        self._open.discard(connection)
        idle = self._idle.get(origin, [])
        if connection in idle:
            idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One request at a time, and its answer taken apart: by length, in chunks, or to the end of the connection."""

    def __init__(self, pool: Upstream, origin: _Origin) -> None:
        self._pool, self._origin = pool, origin
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._rest = b""
        """Read, and not yet a whole line or head."""
        self._parse = self._head
        self._left = 0
        """Bytes of the body or chunk to come."""
        self._keep = True
        self._paused = False
        self._since_s = 0.0

    def ask(self, reply: Reply, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._reply, self._parse, self._keep = reply, self._head, True
        self._transport.writelines((head, body))

    def usable(self, idle_s: float) -> bool:
        assert self._transport is not None
        return not self._transport.is_closing() and time.monotonic() - self._since_s < idle_s

    def flow(self, on: bool) -> None:
        if self._transport is not None and on is self._paused and not self._transport.is_closing():
            self._paused = not on
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    def abort(self, why: str = "given up") -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.over(UpstreamFailed(why, arrived=True))
        if self._transport is not None:
            self._transport.abort()

    # --- what comes in -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self, self._origin)
        reply, self._reply = self._reply, None
        if reply is not None:
            whole = self._parse == self._to_end and exc is None
            reply.over(None if whole else UpstreamFailed("the connection broke off", arrived=True))

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            while data and self._reply is not None:
                data = self._parse(data)
        except ValueError:
            data = b"?"
        if data:  # no HTTP, or more than the answer
            self.abort("an answer that is no HTTP")

    def _head(self, data: bytes) -> bytes:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            return self._wait_for_more(data, LARGEST_HEAD_BYTES)
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        if version not in ("HTTP/1.1", "HTTP/1.0") or _STATUS.fullmatch(status) is None:
            raise ValueError(first)
        if status.startswith("1"):
            return rest
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or "\n" in line or "\r" in line:
                raise ValueError(line)
            headers[name.lower()] = value.strip()
        self._keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        coding, length = headers.get("transfer-encoding", "").lower(), headers.get("content-length")
        if coding == "chunked":
            self._parse = self._size
        elif coding or (length is not None and _LENGTH.fullmatch(length) is None):
            raise ValueError(coding or length)
        elif length is not None:
            self._left, self._parse = int(length), self._length
        else:
            self._left, self._parse = (0, self._length) if status in ("204", "304") else (1, self._to_end)
        reply = self._reply
        assert reply is not None
        reply.status, reply.headers = int(status), headers
        reply.wake()
        if self._parse == self._length and not self._left:
            self._end()
        return rest

    def _size(self, data: bytes) -> bytes:
        end = data.find(b"\r\n")
        if end < 0:
            return self._wait_for_more(data, LONGEST_LINE_BYTES)
        digits = data[:end].partition(b";")[0].strip()
        if not digits or not _HEX.issuperset(digits):
            raise ValueError(digits)
        left, start = int(digits, 16), end + 2
        end = start + left
        if left and data[end : end + 2] == b"\r\n":  # as a rule all of it is there
            assert self._reply is not None
            self._reply.came(data[start:end])
            return data[end + 2 :]
        self._left = left
        self._parse = self._chunk if left else self._trailer
        return data[start:]

    def _chunk(self, data: bytes) -> bytes:
        reply, left = self._reply, self._left
        assert reply is not None
        if len(data) < left + 2:
            if left:
                piece = data[:left]
                self._left -= len(piece)
                reply.came(piece)
                return data[left:]
            return self._wait_for_more(data, LONGEST_LINE_BYTES)
        if data[left : left + 2] != b"\r\n":
            raise ValueError("a chunk without end")
        self._parse = self._size
        if left:
            reply.came(data[:left])
        return data[left + 2 :]

    def _trailer(self, data: bytes) -> bytes:
        line, found, rest = data.partition(b"\r\n")
        if not found:
            return self._wait_for_more(data, LONGEST_LINE_BYTES)
        if not line:
            self._end()
        return rest

    def _length(self, data: bytes) -> bytes:
        assert self._reply is not None
        piece = data[: self._left]
        self._left -= len(piece)
        self._reply.came(piece)
        if not self._left:
            self._end()
        return data[len(piece) :]

    def _to_end(self, data: bytes) -> bytes:
        assert self._reply is not None
        self._reply.came(data)
        return b""

    def _wait_for_more(self, data: bytes, most: int) -> bytes:
        if len(data) > most:
            raise ValueError("a line without end")
        self._rest = data
        return b""

    def _end(self) -> None:
        """The answer is complete: the next request may follow."""
        reply, self._reply = self._reply, None
        assert reply is not None and self._transport is not None
        self.flow(True)
        if self._keep and not self._transport.is_closing():
            self._since_s = time.monotonic()
            self._pool.free(self, self._origin)
        else:
            self._transport.close()
        reply.over()
