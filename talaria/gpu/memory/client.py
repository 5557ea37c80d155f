"""A rank's end of its connection to the host pool: what the scheduler asks and waits for, and what comes by itself."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from talaria.gpu.memory.cpu import MemoryFile
from talaria.gpu.protocol import memory as protocol

_ANSWER_S: Final = 60.0
"""An agent that neither reads nor answers for so long is not there any more."""
_log = logging.getLogger(__name__)
_decoder: Final = msgspec.msgpack.Decoder(protocol.ToRank)
Answer = TypeVar("Answer", protocol.Found, protocol.Drained)


class PoolClient:
    """Connected from its start on. Once the connection is lost nothing is found and nothing is kept, and no method raises.

    ``granted(number, pages, slabs, kept)`` is called on a thread of its own, in the order of the questions; with nothing and False where
    there is no pool any more.
    """

    def __init__(self, path: str, join: protocol.Join, granted: Callable[[int, array[int], array[int], bool], None]) -> None:
        """Raises OSError or ValueError where there is no pool for this rank."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_ANSWER_S), 0))
        self._granted = granted
        self._numbers = itertools.count(1)
        self._answers: queue.SimpleQueue[protocol.Found | protocol.Drained | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._saves: list[int] = []
        self._lost = False
        self._input = self._socket.makefile("rb")
        with contextlib.ExitStack() as failing:
            failing.callback(self._input.close)
            failing.callback(self._socket.close)
            self._socket.settimeout(_ANSWER_S)
            try:
                self._socket.connect(path)
                _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
                for descriptor in descriptors:
                    failing.callback(os.close, descriptor)
                self._send(join)
                welcome = self._receive()
            except TimeoutError:
                raise OSError("the agent that keeps the host pool does not answer") from None
            except EOFError:
                raise OSError("the agent that keeps the host pool is gone") from None
            if not isinstance(welcome, protocol.Welcome) or len(descriptors) != 1:
                raise ValueError(welcome.why if isinstance(welcome, protocol.Refused) else "the agent does not offer its host pool")
            failing.pop_all()
        self._socket.settimeout(None)
        self.slab_bytes = welcome.slab_bytes
        self.partition_bytes = welcome.slabs * welcome.slab_bytes
        self.pool = MemoryFile(descriptors[0], self.partition_bytes * join.ranks)
        self._thread = threading.Thread(target=self._listen, name="talaria-pool", daemon=True)
        self._thread.start()

    def find(self, request: str, digests: Sequence[str]) -> tuple[int, array[int]]:
        """(pages, their slabs). What is found stays until ``done``."""
        number = next(self._numbers)
        self._send(protocol.Find(number, request, bytes.fromhex("".join(digests))))
        found = self._answer(protocol.Found, number)
        return (found.pages, array("I", found.slabs)) if found is not None else (0, array("I"))

    def pin(self, request: str, pages: int) -> None:
        self._send(protocol.Pin(request, pages))

    def done(self, request: str, *, complete: bool = True) -> None:
        self._send(protocol.Done(request, complete))

    def save(self, number: int, digests: Sequence[str]) -> None:
        """Offer a whole path; ``granted`` answers, perhaps before this returns."""
        with self._sending:
            if not self._lost:
                self._saves.append(number)
                self._write(protocol.Save(number, bytes.fromhex("".join(digests))))
                return
        self._granted(number, array("I"), array("I"), False)

    def saved(self, number: int, *, complete: bool) -> None:
        self._send(protocol.Saved(number, complete))

    def drain(self) -> None:
        """Returns when the store knows."""
        number = next(self._numbers)
        self._send(protocol.Drain(number))
        self._answer(protocol.Drained, number)

    def close(self) -> None:
        self._hang_up()
        self._thread.join()
        self._input.close()
        self._socket.close()
        self.pool.close()

    def _answer(self, kind: type[Answer], number: int) -> Answer | None:
        """The answer to a question; None without a connection."""
        while not self._lost:
            try:
                answer = self._answers.get(timeout=_ANSWER_S)
            except queue.Empty:
                _log.error("talaria: the instance agent does not answer")
                self._hang_up()
                return None
            if isinstance(answer, kind) and answer.number == number:
                return answer
        return None

    def _send(self, message: protocol.FromRank) -> None:
        with self._sending:
            if not self._lost:
                self._write(message)

    def _write(self, message: protocol.FromRank) -> None:
        try:
            self._socket.sendall(protocol.frame(message))
        except OSError as error:
            _log.warning("talaria: the host pool is lost: %s", error)
            self._hang_up()

    def _hang_up(self) -> None:
        """The listening thread hears of it and does the rest: what has been granted and what never will be is for one thread to say."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> protocol.ToRank:
        """Raises EOFError at the end, and ValueError or MsgspecError on what is not a message."""
        head = self._input.read(4)
        length = int.from_bytes(head, "big")
        body = self._input.read(length) if length <= protocol.LONGEST_FRAME_BYTES else b""
        if len(head) < 4 or len(body) < length:
            raise EOFError
        return _decoder.decode(body)

    def _listen(self) -> None:
        try:
            while True:
                message = self._receive()
                if isinstance(message, protocol.Granted):
                    self._saves.remove(message.number)
                    self._granted(message.number, array("I", message.pages), array("I", message.slabs), message.kept)
                elif isinstance(message, (protocol.Found, protocol.Drained)):
                    self._answers.put(message)
        except EOFError:
            pass
        except Exception as error:  # nothing that came after it would be heard
            _log.warning("talaria: the host pool is lost: %r", error)
            self._hang_up()
        self._lose()

    def _lose(self) -> None:
        """On the listening thread, at its end."""
        with self._sending:
            self._lost = True
            saves, self._saves = self._saves, []
        self._answers.put(None)
        for number in saves:
            self._granted(number, array("I"), array("I"), False)
