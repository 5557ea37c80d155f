"""A load of streamed chat calls against one endpoint, from a process of its own: sessions of several turns over keep-alive connections.

    python -m benchmarks.load '{"url": "http://127.0.0.1:8400", "calls": 4000, "rate": 200}'

Prints a document of what became of every call. The text of an answer is checked against what the stub engine says to such a
prompt, and goes into the session's next prompt. Made to cost little, since it shares its machine with what it measures: a session's
body and its expected answers grow with it, and a call is neither a task nor a future.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import re
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import uvloop

from tests.gpu.stub.text import ANSWER, said, seed_of, turn

PATH = "/v1/chat/completions"
CONTENT = re.compile(rb'"content":"([^"]+)"')
WATCH_S = 0.5
"""How often calls are looked at that take too long."""


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    calls: int
    rate: float | None = None
    """Calls per second, Poisson. None: ``workers`` send one after the other."""
    workers: int = 64
    sessions: int = 64
    """That take turns."""
    turns: int = 5
    """Calls of a session, which then ends; another begins."""
    tokens: int = 20
    body_bytes: int = 8192
    model: str = "m0"
    key: str = ""
    quick_ack: bool = True
    """False: acknowledge as late as TCP may, which is where Nagle's algorithm on the other side shows."""
    timeout_s: float = 60.0
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """What became of all calls. Seconds since the request was written."""

    first_s: list[float] = field(default_factory=list)
    """To the first event of a stream that ended well."""
    whole_s: list[float] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    """``completed``, ``status 503``, ``cut off``, ``wrong text``, ``timeout``."""
    late_s: list[float] = field(default_factory=list)
    """How much later than planned calls were sent: what this process itself is behind."""
    most_in_flight: int = 0
    cpu_s: float = 0.0
    """Of this process, for all of it."""
    errors: list[str] = field(default_factory=list)
    """The first few bodies of errors."""


class Session:
    _numbers = itertools.count()

    def __init__(self, load: Load) -> None:
        number = next(Session._numbers)
        self.id = f"load-{load.seed}-{number}"
        self.turn = self._seed = 0
        known = {"model": load.model, "max_tokens": load.tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        self._body = bytearray(json.dumps(known).encode()[:-1] + b', "messages": [')
        text = random.Random(f"{load.seed}/{number}").randbytes(load.body_bytes // 2).hex()
        self._say("system", text[: load.body_bytes])
        self._say("user", "begin")

    def _say(self, role: str, text: str) -> None:
        self._body += b'%b{"role": "%b", "content": "%b"}' % (b", " if self._seed else b"", role.encode(), text.encode())
        self._seed = seed_of(turn(role, text), self._seed)

    def body(self) -> bytes:
        return bytes(self._body) + b"]}"

    def expected(self, tokens: int) -> str:
        """The answer to ``body``."""
        return said(seed_of(ANSWER, self._seed), tokens)

    def heard(self, text: str) -> None:
        self.turn += 1
        self._say("assistant", text)
        self._say("user", f"more {self.turn}")


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one call on it."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._quick_ack = generator.load.quick_ack
        self._socket: Any = None
        self.transport: Any = None
        self.session: Session | None = None
        """Whose call is on it."""
        self.received = bytearray()
        self._chunked = False
        """The answer says itself where it ends."""
        self.began_s = self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._socket = transport, transport.get_extra_info("socket")

    def send(self, session: Session, request: bytes) -> None:
        self.received.clear()
        self.session, self.first_s, self._chunked = session, 0.0, False
        self.began_s = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self.received:  # what was sent since has changed it
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, int(self._quick_ack))
        self.received += data
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter()
        if self.session is not None and self._complete():
            self._generator.answered(self)

    def _complete(self) -> bool:
        if self.received.endswith(b"\r\n0\r\n\r\n"):
            return True
        if self._chunked:
            return False
        head, found, _ = bytes(self.received[:4096]).partition(b"\r\n\r\n")
        self._chunked = bool(found) and b"transfer-encoding: chunked" in head.lower()
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        return bool(found and length and len(self.received) - len(head) - 4 >= int(length[1]))

    def connection_lost(self, _: Exception | None) -> None:
        if self.session is not None:
            self._generator.over(self, "cut off")


class Generator:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.outcome = Outcome()
        url = urlsplit(load.url)
        self._host, self._port = url.hostname, url.port
        key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
        self._head = f"POST {PATH} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n{key}".encode()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sessions = deque(Session(load) for _ in range(load.sessions))
        self._in_flight = self._begun = self._over = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._all_over = asyncio.Event()

    async def run(self) -> Outcome:
        watch = asyncio.create_task(self._watch())
        if self.load.rate is None:
            for _ in range(min(self.load.workers, self.load.calls)):
                self._call()
        else:
            await self._open_loop(self.load.rate)
        await self._all_over.wait()
        watch.cancel()
        return self.outcome

    async def _open_loop(self, rate: float) -> None:
        gaps = random.Random(self.load.seed)
        due_s = time.perf_counter()
        for _ in range(self.load.calls):
            due_s += gaps.expovariate(rate)
            await asyncio.sleep(due_s - time.perf_counter())
            self.outcome.late_s.append(time.perf_counter() - due_s)
            self._call()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            late_s = time.perf_counter() - self.load.timeout_s
            for connection in [each for each in self._busy if each.began_s < late_s]:
                self.over(connection, "timeout")

    # --- a call -------------------------------------------------------------------------------------------------------

    def _call(self) -> None:
        session = self._sessions.popleft() if self._sessions else Session(self.load)
        self._begun += 1
        self._in_flight += 1
        self.outcome.most_in_flight = max(self.outcome.most_in_flight, self._in_flight)
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                self._send(connection, session)
                return
        task = asyncio.create_task(self._connect(session))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, session: Session) -> None:
        try:
            async with asyncio.timeout(self.load.timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(self), self._host, self._port)
        except OSError as error:
            self._ended(session, "timeout" if isinstance(error, TimeoutError) else "cut off")
        else:
            self._send(connection, session)

    def _send(self, connection: Connection, session: Session) -> None:
        body = session.body()
        self._busy.add(connection)
        connection.send(session, b"%bX-Session-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, session.id.encode(), len(body), body))

    def answered(self, connection: Connection) -> None:
        """The answer is complete."""
        ended_s, session, received = time.perf_counter(), connection.session, connection.received
        assert session is not None
        if not received.startswith(b"HTTP/1.1 200"):
            self.over(connection, f"status {bytes(received[9:12]).decode()}")
            return
        text = b"".join(CONTENT.findall(received)).decode()
        if text != session.expected(self.load.tokens) or b"[DONE]" not in received:
            self.over(connection, "wrong text" if b'"error"' not in received else "error in stream")
            return
        session.heard(text)
        self.outcome.first_s.append(connection.first_s - connection.began_s)
        self.outcome.whole_s.append(ended_s - connection.began_s)
        self.over(connection, "completed")

    def over(self, connection: Connection, outcome: str) -> None:
        """Whichever way the call on it has ended."""
        session, connection.session = connection.session, None
        assert session is not None
        self._busy.discard(connection)
        if outcome in ("timeout", "cut off"):
            connection.transport.abort()
        else:
            self._idle.append(connection)
        if outcome != "completed" and connection.received and len(self.outcome.errors) < 5:
            self.outcome.errors.append(bytes(connection.received[-400:]).decode(errors="replace"))
        self._ended(session, outcome)

    def _ended(self, session: Session, outcome: str) -> None:
        self._in_flight -= 1
        self._over += 1
        self.outcome.outcomes[outcome] = self.outcome.outcomes.get(outcome, 0) + 1
        done = outcome != "completed" or session.turn >= self.load.turns
        self._sessions.append(Session(self.load) if done else session)
        if self._over == self.load.calls:
            self._all_over.set()
        elif self.load.rate is None and self._begun < self.load.calls:
            self._call()


async def main(load: Load) -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    began_s = time.process_time()
    outcome = await Generator(load).run()
    outcome.cpu_s = time.process_time() - began_s
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    uvloop.run(main(Load(**json.loads(sys.argv[1]))))
