"""The agent's end of the Unix socket on which engines hold calls (``protocol.engine``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import msgspec

from talaria.gpu.protocol.engine import LONGEST_FRAME_BYTES, FromEngine, Hello, ToEngine, frame

_decoder: Final = msgspec.msgpack.Decoder(FromEngine)


class HoldServer:
    """Listens for the engines of one instance; one connection per model.

    ``on_message(model, message)`` gets every message, ``Hello`` first; ``on_lost(model)`` ends what the connection's calls were waiting
    for. Both are called from the event loop.
    """

    def __init__(self, on_message: Callable[[str, FromEngine], None], on_lost: Callable[[str], None]) -> None:
        self.path: Path | None = None
        self._on_message = on_message
        self._on_lost = on_lost
        self._connections: dict[str, _Connection] = {}
        self._open: set[_Connection] = set()
        self._greeted: dict[str, asyncio.Future[Hello]] = {}
        self._server: asyncio.Server | None = None

    async def start(self, path: Path) -> None:
        """Raises OSError where the path is too long for a socket (107 bytes) or cannot be made."""
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), path)
        path.chmod(0o600)
        self.path = path

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in tuple(self._open):
                connection.close()
            await self._server.wait_closed()
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    async def hello(self, model: str) -> Hello:
        """The greeting of the model's open connection; waits for one."""
        return await asyncio.shield(self._greeting(model))

    def send(self, model: str, message: ToEngine) -> None:
        """Where the connection is lost, ``on_lost`` has said so, and the message is as lost as the calls."""
        if (connection := self._connections.get(model)) is not None:
            connection.write(frame(message))

    def _greeting(self, model: str) -> asyncio.Future[Hello]:
        if model not in self._greeted:
            self._greeted[model] = asyncio.get_running_loop().create_future()
        return self._greeted[model]

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def greeted(self, connection: _Connection, hello: Hello) -> None:
        """A second connection of a model replaces the first: its engine started anew before the loss was seen."""
        if (earlier := self._connections.get(hello.model)) is not None:
            earlier.close()
            self.lost(earlier)
        connection.model = hello.model
        self._connections[hello.model] = connection
        self._greeting(hello.model).set_result(hello)
        self._on_message(hello.model, hello)

    def said(self, model: str, message: FromEngine) -> None:
        self._on_message(model, message)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection.model is not None and self._connections.get(connection.model) is connection:
            del self._connections[connection.model], self._greeted[connection.model]
            self._on_lost(connection.model)


class _Connection(asyncio.Protocol):
    """Cuts what comes in into frames. Closes on a frame that it cannot read and on anything before ``Hello``."""

    def __init__(self, server: HoldServer) -> None:
        self.model: str | None = None
        self._server = server
        self._read = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.lost(self)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        read: bytes | bytearray = data  # most often whole messages
        if self._read:
            self._read += data
            read = self._read
        at, size = 0, len(read)
        while size - at >= 4:
            length = int.from_bytes(read[at : at + 4], "big")
            if length > LONGEST_FRAME_BYTES:
                return self.close()
            if size - at - 4 < length:
                break
            if not self._took(read[at + 4 : at + 4 + length]):
                return self.close()
            at += 4 + length
        if read is self._read:
            del self._read[:at]
        else:
            self._read += read[at:]

    def _took(self, body: bytes | bytearray) -> bool:
        """Whether the message could be read and is in order."""
        assert self._transport is not None
        if self._transport.is_closing():
            return False
        try:
            message = _decoder.decode(body)
        except msgspec.DecodeError:
            return False
        if self.model is None:
            if not isinstance(message, Hello):
                return False
            self._server.greeted(self, message)
        elif isinstance(message, Hello):
            return False
        else:
            self._server.said(self.model, message)
        return True
