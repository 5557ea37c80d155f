"""A rank's end of its connection to the agent that keeps its arena."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from talaria.gpu.memory.gather import Ledger
from talaria.gpu.memory.wire import Incoming, send
from talaria.gpu.protocol import arena as protocol
from talaria.gpu.protocol.arena import MOST_DESCRIPTORS

_ANSWER_S: Final = 60.0
"""An agent that neither reads nor answers for so long is not there any more, or has another model in the way."""
_GONE: Final = "the agent that keeps the arena is gone"
_NOTHING: Final = protocol.Stage("", 0, 0.0)
_log = logging.getLogger(__name__)


class Tenant:
    """Connected from its start on. ``stage(message, descriptor)`` is called on a thread of its own, since to pin an image takes long, and
    the arena may be asked for meanwhile; whoever gets a descriptor closes it. A wish of before the arena was given is void from then on.

    A connection that has failed is closed, and nothing is said on it again: the agent keeps the arena for this rank until its process ends.
    """

    def __init__(self, path: str, attach: protocol.Attach, stage: Callable[[protocol.Stage, int | None], None]) -> None:
        """Raises OSError or ValueError where there is no arena for this rank."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_ANSWER_S), 0))
        self._incoming = Incoming(protocol.ToRank)
        self._stage = stage
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._taken: queue.SimpleQueue[protocol.Taken | None] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[tuple[protocol.Stage, int | None] | None] = queue.SimpleQueue()
        self.chunks: list[int] = []
        """Descriptors, where the arena was there before."""
        self.image: int | None = None
        """Descriptor of the image that an earlier engine of this model has kept."""
        with contextlib.ExitStack() as failing:
            failing.callback(self._incoming.close)
            failing.callback(self._socket.close)
            self._socket.settimeout(_ANSWER_S)
            try:
                self._socket.connect(path)
                self._send(attach)
                self.welcome = self._welcome()
            except TimeoutError:
                raise OSError("the agent that keeps the arena does not answer") from None
            failing.pop_all()
        self._socket.settimeout(None)
        named = (("talaria-arena", self._listen), ("talaria-wishes", self._fulfil))
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in named]
        for thread in self._threads:
            thread.start()

    def _welcome(self) -> protocol.Welcome:
        """Greeting, image and chunks. Raises OSError, ValueError."""
        messages = self._messages()
        welcome = next(messages)
        if not isinstance(welcome, protocol.Welcome):
            raise ValueError(welcome.why if isinstance(welcome, protocol.Refused) else "the agent does not offer an arena")
        if welcome.image_bytes:
            self.image = self._incoming.descriptors.popleft()
        while welcome.made and len(self.chunks) < welcome.chunks:
            chunks = next(messages)
            assert isinstance(chunks, protocol.Chunks)
            self.chunks += [self._incoming.descriptors.popleft() for _ in range(chunks.count)]
        return welcome

    def made(self, descriptors: Iterable[int]) -> None:
        """This rank has made the arena; takes the descriptors, a few at a time, and closes them. Raises OSError."""
        rest = iter(descriptors)
        while some := list(itertools.islice(rest, MOST_DESCRIPTORS)):
            try:
                self._send(protocol.Chunks(len(some)), some)
            finally:
                for descriptor in some:
                    os.close(descriptor)

    def keep(self, descriptor: int, nbytes: int) -> None:
        """Raises OSError."""
        self._send(protocol.Keep(nbytes), [descriptor])

    def take(self) -> Ledger:
        """The arena is this rank's when this returns, with so much of its weights. Raises OSError where the agent does not answer."""
        number = next(self._numbers)
        self._send(protocol.Take(number))
        while True:
            try:
                taken = self._taken.get(timeout=_ANSWER_S)
            except queue.Empty:
                raise OSError("the agent does not give the arena") from None
            if taken is None:
                raise OSError(_GONE)
            if taken.number == number:
                return Ledger("", taken.staged, taken.dirty_bytes)

    def park(self, ledger: Ledger, teardown_s: float) -> None:
        """Raises OSError, where the agent does not read what it is told either."""
        self._send(protocol.Park(ledger.model, ledger.staged, ledger.dirty_bytes, teardown_s))

    def tell(self, message: protocol.Timed | protocol.Staged) -> None:
        """Raises OSError."""
        self._send(message)

    def close(self) -> None:
        self._hang_up()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _hang_up(self) -> None:
        """The agent and the listening thread hear of it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: protocol.FromRank, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError; then the agent may have read a part of it, and nothing can follow."""
        with self._sending:
            try:
                send(self._socket, message, descriptors)
            except OSError as error:
                self._hang_up()
                full = isinstance(error, (BlockingIOError, TimeoutError))
                raise OSError("the agent that keeps the arena does not read what it is told" if full else f"{_GONE}: {error}") from None

    def _messages(self) -> Iterator[protocol.ToRank]:
        """Until the end. Raises OSError there."""
        while True:
            yield from self._incoming.messages()
            if not self._incoming.receive(self._socket):
                raise OSError(_GONE)

    def _listen(self) -> None:
        wished = False
        try:
            for message in self._messages():
                if isinstance(message, protocol.Taken):
                    if wished:  # it may still be under way, and the agent takes it to be over
                        self._wishes.put((_NOTHING, None))
                        wished = False
                    self._taken.put(message)
                elif isinstance(message, protocol.Stage):
                    wished = bool(message.nbytes)
                    self._wishes.put((message, self._incoming.descriptors.popleft() if message.nbytes else None))
        except Exception as error:  # nothing that came after it would be heard
            _log.warning("talaria: the arena's agent is lost: %s", error)
        self._hang_up()
        self._incoming.close()
        self._taken.put(None)
        self._wishes.put(None)

    def _fulfil(self) -> None:
        while (wish := self._wishes.get()) is not None:
            try:
                self._stage(*wish)
            except Exception as error:  # the agent would wait for what was never begun
                _log.warning("talaria: the arena's agent is given up, since %s cannot be staged: %r", wish[0].model or "nothing", error)
                self._hang_up()
