"""The stub's scheduler: every call is a task of its own, a token every step; control in SGLang's own way, traps included."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from tests.gpu.stub.cache import PrefixCache, Publisher
from tests.gpu.stub.options import Options
from tests.gpu.stub.text import TOKEN_BYTES, word

NATURAL_TOKENS = 64
"""Where a call ends by itself (``stop``), unless it ignores the end."""


TAGS = ["kv_cache", "weights", "cuda_graph"]


class CallError(Exception):
    """A call ends with an error for its client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass(slots=True, eq=False)
class Run:
    """One call in the engine."""

    id: str
    prompt: bytes
    limit: int
    ignore_eos: bool
    task: asyncio.Task[object]
    output: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    """Of the first segment's input: found in the cache."""
    found_tokens: int = 0
    """Of the last one's."""
    stopping: bool = False
    """The segment is to end at its next token."""
    finish: str | None = None
    """``stop``, ``length`` or ``abort``."""
    error: CallError | None = None
    """Why somebody else ended it: its task is cancelled then."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    def end(self, error: CallError) -> None:
        self.error = error
        self.task.cancel()


class Engine:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.timing = options.timing
        self.cache = PrefixCache(options.page_tokens, options.kv_tokens, Publisher(options.kv_events))
        self.running: dict[str, Run] = {}
        """Segments that run or wait for room."""
        self.ended = 0
        self.paused = self.hung = False
        self.released: set[str] = set()
        """Tags of memory that is given back."""
        self._unannounced = False
        self._go = asyncio.Event()
        self._go.set()
        self._room = asyncio.Condition()
        self._running_tokens = self._running_calls = 0

    async def segment(self, run: Run, tokens: int) -> AsyncGenerator[None, None]:
        """Run at most ``tokens`` more tokens, yielding after each."""
        self.running[run.id] = run
        size = min(run.prompt_tokens + len(run.output) + tokens, run.prompt_tokens + run.limit)
        try:
            await self._enter(size)
            try:
                async with aclosing(self._tokens(run, tokens)) as steps:
                    async for _ in steps:
                        yield
            finally:
                await asyncio.shield(self._leave(size))
        finally:
            self.running.pop(run.id, None)

    async def _tokens(self, run: Run, tokens: int) -> AsyncGenerator[None, None]:
        given = run.prompt + b"".join(run.output)
        await self._step(0.0)
        run.found_tokens = self.cache.cached_tokens(given)
        if not run.output:
            run.cached_tokens = run.found_tokens
        await self._step(self.timing.prefill_token_s * (len(given) // TOKEN_BYTES - run.found_tokens))
        self.cache.store(given)
        natural = run.limit if run.ignore_eos else min(run.limit, NATURAL_TOKENS)
        for index in range(tokens):
            if index:
                await self._step(self.timing.step_s)
            if run.finish is None:
                run.output.append(word(run.prompt, len(run.output)))
                if len(run.output) >= natural:
                    run.finish = "length" if natural == run.limit else "stop"
            last = run.stopping or index == tokens - 1
            if run.finish or last:
                self.cache.store(run.prompt + b"".join(run.output))
            yield
            if run.finish or last:
                return

    async def _step(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        while self.paused or self.hung:
            await self._go.wait()
        if self.released:
            self.die("a generation on released memory")

    async def _enter(self, size: int) -> None:
        async with self._room:
            await self._room.wait_for(
                lambda: (
                    not self._running_calls
                    or (self._running_tokens + size <= self.options.kv_tokens and self._running_calls < self.options.max_running)
                )
            )
            self._running_tokens += size
            self._running_calls += 1

    async def _leave(self, size: int) -> None:
        async with self._room:
            self._running_tokens -= size
            self._running_calls -= 1
            self._room.notify_all()

    # --- control ----------------------------------------------------------------------------------------------------

    async def answer(self) -> None:
        """What needs the scheduler process waits for ever once that hangs."""
        while self.hung:
            await asyncio.sleep(3600)

    def die(self, why: str) -> None:
        print(f"stub engine dies: {why}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def pause(self, mode: str) -> None:
        self.paused = True
        self._go.clear()
        if mode == "abort":
            self.abort("")

    def resume_generation(self) -> None:
        self.paused = False
        if self._unannounced:
            self.cache.announce_clear()
            self._unannounced = False
        if not self.hung:
            self._go.set()

    def hang(self) -> None:
        self.hung = True
        self._go.clear()

    def flush(self) -> bool:
        """The idle test too: False where calls run."""
        if self.running:
            return False
        self.cache.clear()
        if self.paused:
            self._unannounced = True
        else:
            self.cache.announce_clear()
        return True

    def release(self, tags: list[str]) -> None:
        if self.released.intersection(tags) or self.running:
            self.die("release of memory that is released, or in use")
        self.released.update(tags)
        self.cache.clear()
        self._unannounced = True

    def resume(self, tags: list[str]) -> None:
        if not self.released.issuperset(tags):
            self.die("resume of memory that is not released")
        self.released.difference_update(tags)

    def abort(self, prefix: str) -> None:
        """Ends every running call whose id begins with ``prefix``: with what it has, or with an error if that is nothing."""
        for run in [run for run in self.running.values() if run.id.startswith(prefix)]:
            run.finish = "abort"
            if not run.output:
                run.end(CallError(503, "The request was aborted."))
