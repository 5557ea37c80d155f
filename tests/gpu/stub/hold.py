"""The hold protocol, as the plugin in a real engine speaks it (talaria/gpu/protocol/engine.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from talaria.gpu.protocol.engine import ABI, Drop, Ended, FromEngine, Grant, Held, Hello, Progress, Stop, ToEngine, frame
from tests.gpu.stub.engine import CallError, Engine, Run

RETRY_S = 0.1


@dataclass(slots=True, eq=False)
class _Call:
    """A call that runs in segments. ``show``: its client may see what is there."""

    run: Run
    show: Callable[[], None]
    before: int = 0
    """Tokens before the segment."""
    granted: bool = False
    budget: int = 0


class Hold:
    """The connection to the agent, and the calls that it decides about. What is said in one turn of the event loop leaves in one write,
    and before the text that it is about."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._unsent = bytearray()
        self._fresh: list[Run] = []
        """Calls to be prepared while the agent hears of them."""
        self._calls: dict[str, _Call] = {}
        self._loop = asyncio.get_running_loop()

    async def serve(self, path: str) -> None:
        """Stay connected; a loss ends every call."""
        while True:
            try:
                _, connection = await self._loop.create_unix_connection(lambda: _Connection(self), path)
                await connection.over
            except OSError:
                pass
            await asyncio.sleep(RETRY_S)

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin(self, run: Run, show: Callable[[], None]) -> None:
        """Wait for grants. Raises CallError without an agent."""
        self._say(Held(run.id, run.prompt, run.limit))
        self._calls[run.id] = _Call(run, show)
        self._fresh.append(run)

    def end(self, run: Run, error: CallError | None) -> None:
        """The call ends before its time, with ``error`` or because its client is gone."""
        call = self._calls.get(run.id)
        if call is not None and call.run is run:
            del self._calls[run.id]
            if self._transport is not None:
                self._say(Ended(run.id, "failed" if error else "aborted", len(run.output), b"", 0, error.why if error else ""))

    def _segment(self, call: _Call, steps: int) -> None:
        run = call.run
        run.stopping, call.granted, call.before = False, True, len(run.output)
        call.budget = max(1, steps) if run.output else 1 + steps
        self._engine.segment(run, call.budget, lambda over: self._token(call, over))

    def _token(self, call: _Call, over: bool) -> None:
        run, done = call.run, len(call.run.output)
        self._say(Progress(run.id, done))
        if over:
            call.granted = False
            more = "grant" if done - call.before == call.budget else "stopped"
            reason = more if run.finish is None else "failed" if run.finish == "abort" else "finished"
            if run.finish is not None:
                del self._calls[run.id]
            self._say(Ended(run.id, reason, done, b"".join(run.output[call.before :]), run.found_tokens))
        call.show()

    # --- the connection -----------------------------------------------------------------------------------------------

    def opened(self, transport: asyncio.Transport) -> None:
        options = self._engine.options
        self._transport = transport
        self._say(
            Hello(
                ABI, options.model, os.getpid(), options.page_tokens, options.kv_tokens, options.max_running, options.context_tokens
            )
        )  # fmt: skip

    def heard(self, message: ToEngine) -> None:
        call = self._calls.get(message.call)
        if call is None:
            return
        if isinstance(message, Drop):
            call.run.fail(CallError(message.status, message.why))
        elif isinstance(message, Stop):
            call.run.stopping = True
        elif isinstance(message, Grant) and not call.granted:
            self._segment(call, message.steps)

    def lost(self) -> None:
        self._transport = None
        self._unsent.clear()
        for call in list(self._calls.values()):
            call.run.fail(CallError(503, "the agent is gone"))

    def _say(self, message: FromEngine) -> None:
        if self._transport is None:
            raise CallError(503, "no agent")
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += frame(message)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(bytes(self._unsent))
        self._unsent.clear()
        if self._fresh:
            self._loop.call_soon(self._prepare)  # after the write itself, which ends this turn

    def _prepare(self) -> None:
        for run in self._fresh:
            self._engine.prepare(run)
        self._fresh.clear()


class _Connection(asyncio.Protocol):
    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._read = b""
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._transport: asyncio.Transport | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._hold.opened(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hold.lost()
        self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        read, at = self._read + data, 0
        while len(read) - at >= 4:
            end = at + 4 + int.from_bytes(read[at : at + 4], "big")
            if end > len(read):
                break
            self._hold.heard(self._decode(read[at + 4 : end]))
            at = end
        self._read = read[at:]
