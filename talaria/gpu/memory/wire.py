"""Frames with descriptors over a Unix socket (``protocol.arena``): a blocking end for ranks, one of an event loop for their agent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from talaria.gpu.protocol.arena import LONGEST_FRAME_BYTES, MOST_DESCRIPTORS, Message, frame

_READ_BYTES: Final = 64 * 1024


class Incoming:
    """Bytes and descriptors as they come, and the messages in them."""

    def __init__(self, kind: Any) -> None:
        self.descriptors: deque[int] = deque()
        """Of messages that have come or are still to come, in order; whoever takes one closes it."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._read = bytearray()

    def receive(self, connection: socket.socket) -> bool:
        """What has come; False at the end. Raises OSError."""
        data, descriptors, flags, _ = socket.recv_fds(connection, _READ_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self.descriptors += descriptors
        if flags & socket.MSG_CTRUNC:
            raise OSError("descriptors are lost: this process may not open so many files")
        self._read += data
        return bool(data)

    def messages(self) -> Iterator[Any]:
        """Whole ones. Raises ValueError or MsgspecError on what is none."""
        while len(self._read) >= 4:
            length = int.from_bytes(self._read[:4], "big")
            if length > LONGEST_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            if len(self._read) < 4 + length:
                return
            body = bytes(self._read[4 : 4 + length])
            del self._read[: 4 + length]
            yield self._decoder.decode(body)

    def close(self) -> None:
        """With descriptors that nobody took."""
        while self.descriptors:
            os.close(self.descriptors.popleft())


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Blocking. Raises OSError."""
    data = frame(message)
    sent = socket.send_fds(connection, [data], descriptors)
    connection.sendall(data[sent:])


class Connection:
    """One end in the running event loop. ``lost(why)`` is called once, also for a message that ``received`` raises ValueError at."""

    def __init__(
        self, connection: socket.socket, kind: Any, received: Callable[[Any], None], lost: Callable[[str], None]
    ) -> None:
        connection.setblocking(False)
        self.incoming = Incoming(kind)
        self._connection, self._received, self._lost = connection, received, lost
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._readable)
        self._closed = False

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """The descriptors must stay open as long as the connection."""
        if not self._closed:
            self._unsent.append((frame(message), tuple(descriptors)))
            if len(self._unsent) == 1:
                self._write()

    def _write(self) -> None:
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = socket.send_fds(self._connection, [data], descriptors)
                if sent < len(data):
                    self._unsent[0] = (data[sent:], ())
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._write)
        except OSError as error:
            self.close(str(error))
        else:
            self._loop.remove_writer(self._connection)

    def _readable(self) -> None:
        why = ""
        try:
            if self.incoming.receive(self._connection):
                for message in self.incoming.messages():
                    self._received(message)
                    if self._closed:
                        return
                return
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError, msgspec.MsgspecError) as error:
            why = str(error)
        self.close(why)

    def close(self, why: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self.incoming.close()
        self._lost(why)
