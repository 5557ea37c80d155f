"""The process at the other end of a Unix socket: as long as it lives it may touch the memory that it shares with us."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user, group (``unix(7)``)."""


class Peer:
    """Whoever connected ``connection``."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError where it is gone already, or where the system does not tell."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._descriptor = os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])

    async def ended(self) -> None:
        """Wait until it is gone, and with it all that it had begun."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
