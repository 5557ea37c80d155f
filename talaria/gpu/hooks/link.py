"""The engine's end of the socket to its instance agent: connects, says who it is, and tries again after a loss."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from talaria.gpu.protocol import engine

_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 0.5
_log = logging.getLogger(__name__)


class Link:
    """One connection at a time. What is sent in one turn of the event loop leaves in one write; without a connection it is lost."""

    def __init__(
        self, path: str, hello: engine.Hello, received: Callable[[engine.ToEngine], None], lost: Callable[[], None]
    ) -> None:
        self._path = path
        self._hello = hello
        self._received = received
        self._lost = lost
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = bytearray()

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def send(self, message: engine.FromEngine) -> None:
        if self._writer is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += engine.frame(message)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.write(bytes(self._unsent))
        self._unsent.clear()

    async def run(self) -> None:
        """Until cancelled."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            wait_s = _FIRST_WAIT_S
            try:
                self.send(self._hello)
                await self._read(reader)
            except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
                _log.warning("talaria: the connection to the instance agent is lost: %s", error)
            finally:
                writer, self._writer = self._writer, None
                self._unsent.clear()
                writer.close()
                self._lost()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Raises IncompleteReadError at the end, and ValueError or MsgspecError on what is not a message."""
        decoder = msgspec.msgpack.Decoder(engine.ToEngine)
        while True:
            length = int.from_bytes(await reader.readexactly(4), "big")
            if length > engine.LONGEST_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            self._received(decoder.decode(await reader.readexactly(length)))
