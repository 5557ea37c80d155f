"""For tests of the engine plugin: a real engine, and an instance agent that only grants."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from talaria.gpu import config
from talaria.gpu.engine import command, warden
from talaria.gpu.protocol import engine

PATIENCE_S = 120.0
MODEL = "tiny"
_numbers = count(1)


@dataclass(frozen=True)
class HeldEngine:
    """A running engine whose plugin looks for its agent at ``socket``."""

    url: str
    socket: Path
    admin: dict[str, str]
    """Headers of control requests."""
    group: int
    """Process group of its processes."""

    def cpu_s(self) -> float:
        """CPU time of its living processes so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == self.group else 0
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_engine(
    settings: config.Engine, model_path: Path, directory: Path, *, tp: int = 1, arguments: tuple[str, ...] = (), shims: str = ""
) -> Iterator[HeldEngine]:
    """Starts one, ready for calls, under a warden that leaves nothing of it behind."""
    model = config.Model(path=str(model_path), tool_parser="qwen25", reasoning_parser="qwen3", kv_tokens=20_000, arguments=arguments)
    instance = config.Instance(name="group", models=(MODEL,), tp=tp, max_running=16)
    place = command.Place(command.free_port(), directory / "place", "held")
    place.directory.mkdir()
    socket = directory / "agent.sock"
    environment = command.environment(MODEL, model, instance, settings, place, socket)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), shims]))
    with (directory / "engine.log").open("wb") as log:
        words = command.command(MODEL, model, instance, settings, place)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(warden.__file__), str(place.directory), *words], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        group = int(process.stdout.readline())
        _until_ready(process, f"{place.url}/health", settings.start_timeout_s, directory / "engine.log")
        yield HeldEngine(place.url, socket, {"Authorization": f"Bearer {place.admin_key}"}, group)
    finally:
        process.stdin.close()
        process.wait(timeout=PATIENCE_S)
        process.stdout.close()


def _until_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float, log: Path) -> None:
    end_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


class Granter:
    """Answers every held call with grants from ``steps`` (the last one again and again), after ``between`` from the second on."""

    def __init__(self) -> None:
        self.hello: engine.Hello | None = None
        self.hellos = 0
        self.steps: Iterable[int] = (10**6,)
        self.between: Callable[[], Awaitable[None]] | None = None
        self.stop_at: type[engine.Grant | engine.Progress] | None = None
        """A ``Stop`` follows every message of this kind."""
        self.granting = True
        """False: no call is granted anything by itself."""
        self._seen: defaultdict[str, list[Any]] = defaultdict(list)
        self._grants: dict[str, Iterator[int]] = {}
        self._changed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: engine.ToEngine) -> None:
        self.write(engine.frame(message))

    def write(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._connections += 1
        decoder = msgspec.msgpack.Decoder(engine.FromEngine)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                self._take(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections -= 1
            self.hello = None
            self._changed.set()
            writer.close()

    async def cut(self) -> None:
        """Ends the connection, as a dying agent does."""
        if self._writer is not None:
            self._writer.close()
        await self.until(lambda: self.hello is None)

    def _take(self, message: Any) -> None:
        if isinstance(message, engine.Hello):
            self.hello = message
            self.hellos += 1
        else:
            self._seen[message.call].append(message)
            if self.stop_at is type(message):
                self.send(engine.Stop(message.call))
            held = isinstance(message, engine.Held) or (isinstance(message, engine.Ended) and message.reason in engine.HELD_AGAIN)
            if self.granting and held:
                task = asyncio.get_running_loop().create_task(self._grant(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._changed.set()

    async def _grant(self, message: Any) -> None:
        if isinstance(message, engine.Held):
            steps = list(self.steps)
            self._grants[message.call] = iter([*steps, *repeat(steps[-1], 10_000)])
        elif self.between is not None:
            await self.between()
        self.send(engine.Grant(message.call, next(self._grants[message.call])))
        if self.stop_at is engine.Grant:
            self.send(engine.Stop(message.call))

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Waits for ``holds()`` to be true and returns it. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while not (result := holds()):
                self._changed.clear()
                await self._changed.wait()
        return result

    def of(self, call: str, kind: type) -> list[Any]:
        return [message for message in self._seen[call] if isinstance(message, kind)]

    async def first(self, call: str, kind: type) -> Any:
        return await self.until(lambda: next(iter(self.of(call, kind)), None))

    async def last(self, call: str) -> engine.Ended:
        """The call's last word."""
        final: engine.Ended = await self.until(
            lambda: next((end for end in self.of(call, engine.Ended) if end.reason not in engine.HELD_AGAIN), None)
        )
        return final

    def output(self, call: str) -> list[int]:
        return [token for ended in self.of(call, engine.Ended) for token in array("I", ended.tokens)]


class Desk:
    """A granter and a client of one engine."""

    def __init__(self, held: HeldEngine, agent: Granter, http: aiohttp.ClientSession) -> None:
        self.held = held
        self.agent = agent
        self.http = http

    async def post(self, path: str, body: dict[str, Any], call: str | None = None) -> tuple[int, str]:
        headers = {} if call is None else {engine.CALL_HEADER: call}
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.text()

    async def control(self, path: str, body: dict[str, Any] | None = None) -> int:
        async with self.http.post(path, json=body, headers=self.held.admin) as response:
            return response.status

    async def flush(self) -> None:
        """Empties the prefix cache, as a switch does; waits for the engine to be idle."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.control("/flush_cache") != 200:
                await asyncio.sleep(0.01)


def new_call() -> str:
    return engine.call_id(next(_numbers))


@asynccontextmanager
async def desk(held: HeldEngine) -> AsyncIterator[Desk]:
    """Listens on the engine's socket and waits for the engine."""
    agent = Granter()
    held.socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(agent.serve, str(held.socket))
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    try:
        async with aiohttp.ClientSession(held.url, timeout=timeout) as http:
            await agent.until(lambda: agent.hello)
            yield Desk(held, agent, http)
    finally:
        server.close()
        await agent.cut()
