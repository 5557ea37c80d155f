"""The hold protocol, as the plugin in a real engine speaks it (talaria/gpu/protocol/engine.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from talaria.gpu.protocol.engine import ABI, Drop, Ended, FromEngine, Grant, Held, Hello, Progress, Stop, ToEngine, frame
from tests.gpu.stub.engine import CallError, Engine, Run

RETRY_S = 0.1


class Hold:
    """The connection to the agent, and the calls that it decides about."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer: asyncio.StreamWriter | None = None
        self._runs: dict[str, Run] = {}
        self._granted: dict[str, asyncio.Future[int]] = {}

    async def serve(self, path: str) -> None:
        """Stay connected; a loss ends every call."""
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(path)
                self._hello()
                while True:
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    self._heard(decoder.decode(await reader.readexactly(size)))
            except (OSError, asyncio.IncompleteReadError):
                self._lost()
                await asyncio.sleep(RETRY_S)

    async def run(self, run: Run) -> AsyncGenerator[None, None]:
        """All of a call, segment after segment as they are granted; yields after each token. Raises CallError."""
        self._runs[run.id] = run
        ended = False
        try:
            self._say(Held(run.id, run.prompt, run.limit))
            while run.finish is None:
                steps = await self._grant(run.id)
                before = len(run.output)
                budget = max(1, steps) if before else 1 + steps
                async with aclosing(self._engine.segment(run, budget)) as tokens:
                    async for _ in tokens:
                        self._say(Progress(run.id, len(run.output)))
                        if len(run.output) - before < budget and run.finish is None:
                            yield
                more = "grant" if len(run.output) - before == budget else "stopped"
                reason = more if run.finish is None else "failed" if run.finish == "abort" else "finished"
                ended = run.finish is not None
                self._say(Ended(run.id, reason, len(run.output), b"".join(run.output[before:]), run.found_tokens))
                yield
        finally:
            del self._runs[run.id]
            self._granted.pop(run.id, None)
            if not ended and self._writer is not None:
                self._say(Ended(run.id, "failed" if run.error else "aborted", len(run.output), b"", 0, run.error.why if run.error else ""))

    async def _grant(self, call: str) -> int:
        future = self._granted[call] = asyncio.get_running_loop().create_future()
        return await future

    def _hello(self) -> None:
        options = self._engine.options
        self._say(
            Hello(
                ABI, options.model, os.getpid(), options.page_tokens, options.kv_tokens, options.max_running, options.context_tokens
            )
        )  # fmt: skip

    def _heard(self, message: ToEngine) -> None:
        if isinstance(message, Grant):
            future = self._granted.pop(message.call, None)
            if future is not None and not future.done():
                # Before the call's task wakes: a stop may have come in the same bytes.
                self._runs[message.call].stopping = False
                future.set_result(message.steps)
        elif isinstance(message, Stop) and message.call in self._runs:
            self._runs[message.call].stopping = True
        elif isinstance(message, Drop) and message.call in self._runs:
            self._runs[message.call].end(CallError(message.status, message.why))

    def _lost(self) -> None:
        self._writer = None
        for run in list(self._runs.values()):
            run.end(CallError(503, "the agent is gone"))

    def _say(self, message: FromEngine) -> None:
        if self._writer is None:
            raise CallError(503, "no agent")
        self._writer.write(frame(message))
