"""An instance agent that only grants: what tests of the engine plugin talk to."""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from talaria.gpu.protocol import engine

PATIENCE_S = 120.0


class Granter:
    """Answers every held call with grants from ``steps`` (the last one again and again), after ``between`` from the second on."""

    def __init__(self) -> None:
        self.hello: engine.Hello | None = None
        self.steps: Iterable[int] = (10**6,)
        self.between: Callable[[], Awaitable[None]] | None = None
        self.holding = False
        """True: no call is granted anything by itself."""
        self.seen: defaultdict[str, list[Any]] = defaultdict(list)
        self._grants: dict[str, Iterator[int]] = {}
        self._changed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: engine.ToEngine) -> None:
        assert self._writer is not None
        self._writer.write(engine.frame(message))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        decoder = msgspec.msgpack.Decoder(engine.FromEngine)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                self._take(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hello = None
        finally:
            writer.close()

    def cut(self) -> None:
        """Ends the connection, as a dying agent does."""
        assert self._writer is not None
        self._writer.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, engine.Hello):
            self.hello = message
        else:
            self.seen[message.call].append(message)
            if not self.holding and (isinstance(message, engine.Held) or (isinstance(message, engine.Ended) and message.reason == "grant")):
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

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Waits for ``holds()`` to be true and returns it. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while not (result := holds()):
                self._changed.clear()
                await self._changed.wait()
        return result

    def of(self, call: str, kind: type) -> list[Any]:
        return [message for message in self.seen[call] if isinstance(message, kind)]

    async def last(self, call: str) -> engine.Ended:
        """The call's last ``Ended``."""
        final: engine.Ended = await self.until(lambda: next((m for m in self.of(call, engine.Ended) if m.reason != "grant"), None))
        return final

    def output(self, call: str) -> list[int]:
        return [token for ended in self.of(call, engine.Ended) for token in array("I", ended.tokens)]


@asynccontextmanager
async def granter(socket: Path) -> AsyncIterator[Granter]:
    """Listens on ``socket`` and waits for the engine."""
    agent = Granter()
    socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(agent.serve, str(socket))
    try:
        await agent.until(lambda: agent.hello)
        yield agent
    finally:
        server.close()
        agent.cut() if agent.hello else None
