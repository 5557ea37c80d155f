"""A load of streamed chat calls against one endpoint, from a process of its own: sessions of several turns over keep-alive connections.

    python -m benchmarks.load '{"url": "http://127.0.0.1:8400", "calls": 4000, "rate": 200}'

Prints a document of what became of every call. The text of an answer is checked against what the stub engine says to such a
prompt, and goes into the session's next prompt.
"""

from __future__ import annotations

import asyncio
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

from tests.gpu.stub.text import answer, prompt_of

PATH = "/v1/chat/completions"
CONTENT = re.compile(rb'"content":"([^"]+)"')


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
    errors: list[str] = field(default_factory=list)
    """The first few bodies of errors."""


class Session:
    _numbers = itertools.count()

    def __init__(self, load: Load) -> None:
        number = next(Session._numbers)
        self.id = f"load-{load.seed}-{number}"
        self.turn = 0
        text = random.Random(f"{load.seed}/{number}").randbytes(load.body_bytes // 2).hex()
        self.messages = [{"role": "system", "content": text[: load.body_bytes]}, {"role": "user", "content": "begin"}]

    def body(self, load: Load) -> dict[str, Any]:
        return {
            "model": load.model, "messages": self.messages, "max_tokens": load.tokens, "stream": True, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip

    def heard(self, text: str) -> None:
        self.turn += 1
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"more {self.turn}"}]


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, quick_ack: bool) -> None:
        self._quick_ack = quick_ack
        self._socket: Any = None
        self.transport: Any = None
        self.open = True
        self._chunked = False
        """The answer says itself where it ends."""
        self.received = bytearray()
        self.first_s = 0.0
        self.over: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._socket = transport, transport.get_extra_info("socket")
        self._acknowledge()

    def _acknowledge(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, int(self._quick_ack))

    def send(self, request: bytes) -> asyncio.Future[None]:
        self.received.clear()
        self.first_s, self._chunked = 0.0, False
        self.over = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.over

    def data_received(self, data: bytes) -> None:
        self._acknowledge()
        self.received += data
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter()
        if self.over is not None and not self.over.done() and self._complete():
            self.over.set_result(None)

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
        self.open = False
        if self.over is not None and not self.over.done():
            self.over.set_exception(ConnectionError("cut off"))


class Generator:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.outcome = Outcome()
        url = urlsplit(load.url)
        self._host, self._port = url.hostname, url.port
        self._idle: list[Connection] = []
        self._sessions = deque(Session(load) for _ in range(load.sessions))
        self._in_flight = 0

    async def run(self) -> Outcome:
        if self.load.rate is None:
            left = iter(range(self.load.calls))
            await asyncio.gather(*(self._worker(left) for _ in range(self.load.workers)))
        else:
            await self._open_loop(self.load.rate)
        return self.outcome

    async def _worker(self, left: Any) -> None:
        for _ in left:
            await self._call()

    async def _open_loop(self, rate: float) -> None:
        gaps = random.Random(self.load.seed)
        due_s, calls = time.perf_counter(), []
        for _ in range(self.load.calls):
            due_s += gaps.expovariate(rate)
            await asyncio.sleep(due_s - time.perf_counter())
            self.outcome.late_s.append(time.perf_counter() - due_s)
            calls.append(asyncio.create_task(self._call()))
        await asyncio.gather(*calls)

    async def _call(self) -> None:
        session = self._sessions.popleft() if self._sessions else Session(self.load)
        self._in_flight += 1
        self.outcome.most_in_flight = max(self.outcome.most_in_flight, self._in_flight)
        try:
            outcome = await self._turn(session)
        except TimeoutError:
            outcome = "timeout"
        except OSError:
            outcome = "cut off"
        self._in_flight -= 1
        self.outcome.outcomes[outcome] = self.outcome.outcomes.get(outcome, 0) + 1
        done = outcome != "completed" or session.turn >= self.load.turns
        self._sessions.append(Session(self.load) if done else session)

    async def _turn(self, session: Session) -> str:
        body = session.body(self.load)
        expected = answer(prompt_of(PATH, body), self.load.tokens)
        request = self._request(session, json.dumps(body).encode())
        connection = await self._connection()
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.load.timeout_s):
                await connection.send(request)
        except BaseException:
            connection.transport.abort()
            raise
        ended_s = time.perf_counter()
        self._idle.append(connection)
        if not connection.received.startswith(b"HTTP/1.1 200"):
            status = bytes(connection.received[9:12]).decode()
            self._note(connection)
            return f"status {status}"
        text = b"".join(CONTENT.findall(connection.received)).decode()
        if text != expected or b"[DONE]" not in connection.received:
            self._note(connection)
            return "wrong text" if b'"error"' not in connection.received else "error in stream"
        session.heard(text)
        self.outcome.first_s.append(connection.first_s - began_s)
        self.outcome.whole_s.append(ended_s - began_s)
        return "completed"

    def _note(self, connection: Connection) -> None:
        if len(self.outcome.errors) < 5:
            self.outcome.errors.append(bytes(connection.received[-400:]).decode(errors="replace"))

    def _request(self, session: Session, body: bytes) -> bytes:
        key = f"Authorization: Bearer {self.load.key}\r\n" if self.load.key else ""
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n{key}"
            f"X-Session-Id: {session.id}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Connection(self.load.quick_ack), self._host, self._port)
        return made


async def main(load: Load) -> None:
    print(json.dumps(asdict(await Generator(load).run())))


if __name__ == "__main__":
    uvloop.run(main(Load(**json.loads(sys.argv[1]))))
