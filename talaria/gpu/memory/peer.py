"""The process at the other end of a Unix socket: as long as it lives it may touch the memory that it shares with us."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user, group (``unix(7)``)."""
_LINGER_S: Final = 1.0
"""How long a process may take to end after its connections."""


class Peer:
    """Whoever connected ``connection``."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError where it is gone already, or where the system does not tell."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._descriptor = os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])

    async def gone(self, lingers: Callable[[], None]) -> None:
        """Its connection has ended: wait until the process has, too. ``lingers()`` is called where it goes on without."""
        try:
            async with asyncio.timeout(_LINGER_S):
                return await self._ended()
        except TimeoutError:
            lingers()
        await self._ended()

    async def _ended(self) -> None:
        """It is gone, and with it all that it had begun."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
