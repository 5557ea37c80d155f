"""The stub's scheduler: all running calls get their next token at the same step; control in SGLang's own way, traps included."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.gpu.stub.cache import PrefixCache, Publisher
from tests.gpu.stub.options import Options
from tests.gpu.stub.text import TOKEN_BYTES, seed_of, word

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
    fail: Callable[[CallError], None]
    """Ends it for everybody, its client included."""
    seed: int = 0
    pages: list[bytes] = field(default_factory=list)
    """Digests of what is in the prefix cache, or was."""
    output: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    """Of the first segment's input: found in the cache."""
    found_tokens: int = 0
    """Of the last one's."""
    stopping: bool = False
    """The segment is to end at its next token."""
    finish: str | None = None
    """``stop``, ``length`` or ``abort``."""
    left: int = 0
    """Tokens of the segment to come."""
    told: Callable[[bool], None] = lambda over: None
    """Called after every token of the segment; ``over``: it was the last one."""
    reserved: int | None = None
    """Tokens of KV, once there is room for the segment."""
    timer: asyncio.TimerHandle | None = None
    """Of the prefill."""

    def __post_init__(self) -> None:
        self.seed = seed_of(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + len(self.output)

    @property
    def ids(self) -> bytes:
        return self.prompt + b"".join(self.output)


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
        self._decoding: dict[str, Run] = {}
        self._stalled: list[Callable[[], None]] = []
        """What goes on when a pause is over."""
        self._step: asyncio.TimerHandle | asyncio.Handle | None = None
        self._running_tokens = self._running_calls = 0
        self._loop = asyncio.get_running_loop()

    # --- segments -----------------------------------------------------------------------------------------------------

    def prepare(self, run: Run) -> None:
        """What can be done before there is a segment."""
        self.cache.extend(run.pages, run.prompt)

    def segment(self, run: Run, tokens: int, told: Callable[[bool], None]) -> None:
        """Run at most ``tokens`` more tokens, as soon as there is room."""
        self.running[run.id] = run
        run.left, run.told = tokens, told
        self._let_in()

    def leave(self, run: Run) -> None:
        """The segment is over, or nobody wants it any more."""
        if self.running.pop(run.id, None) is None:
            return
        self._decoding.pop(run.id, None)
        if not self._decoding and self._step is not None:
            self._step.cancel()
            self._step = None
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None
        if run.reserved is not None:
            self._running_tokens -= run.reserved
            self._running_calls -= 1
            run.reserved = None
            self._let_in()

    def _let_in(self) -> None:
        if self._running_calls == len(self.running):
            return
        for run in [run for run in self.running.values() if run.reserved is None]:
            size = min(run.tokens + run.left, run.prompt_tokens + run.limit)
            full = self._running_tokens + size > self.options.kv_tokens or self._running_calls >= self.options.max_running
            if run.reserved is None and run.id in self.running and not (full and self._running_calls):
                run.reserved = size
                self._running_tokens += size
                self._running_calls += 1
                self._prefill(run)

    def _prefill(self, run: Run) -> None:
        if not self._goes(run, self._prefill):
            return
        self.cache.extend(run.pages, run.ids)
        run.found_tokens = self.cache.cached_tokens(run.pages, run.tokens)
        if not run.output:
            run.cached_tokens = run.found_tokens
        seconds = self.timing.prefill_token_s * (run.tokens - run.found_tokens)
        if seconds:
            run.timer = self._loop.call_later(seconds, self._prefilled, run)
        else:
            self._prefilled(run)

    def _prefilled(self, run: Run) -> None:
        run.timer = None
        if not self._goes(run, self._prefilled):
            return
        self.cache.store(run.pages, run.ids)
        self._decoding[run.id] = run
        if self._step is None:
            self._await_step()
        self._token(run)

    def _goes(self, run: Run, later: Callable[[Run], None]) -> bool:
        """Whether the engine computes; what cannot be done now is done ``later``, unless the run has left by then."""
        if self.paused or self.hung:
            self._stalled.append(lambda: later(run) if self.running.get(run.id) is run else None)
            return False
        self._check_memory()
        return True

    def _check_memory(self) -> None:
        if self.released:
            self.die("a generation on released memory")

    def _await_step(self) -> None:
        step_s = self.timing.step_s
        self._step = self._loop.call_later(step_s, self._decode) if step_s else self._loop.call_soon(self._decode)

    def _decode(self) -> None:
        """The next token of every call whose prefill is over."""
        self._step = None
        if not self._decoding or self.paused or self.hung:
            return
        self._check_memory()
        self._await_step()
        for run in list(self._decoding.values()):
            if self._decoding.get(run.id) is run:
                self._token(run)

    def _token(self, run: Run) -> None:
        natural = run.limit if run.ignore_eos else min(run.limit, NATURAL_TOKENS)
        if run.finish is None:
            run.output.append(word(run.seed, len(run.output)))
            if len(run.output) >= natural:
                run.finish = "length" if natural == run.limit else "stop"
        run.left -= 1
        over = run.finish is not None or run.stopping or not run.left
        if over:
            ids = run.ids
            self.cache.extend(run.pages, ids)
            self.cache.store(run.pages, ids)
            self.leave(run)
        run.told(over)

    # --- control ----------------------------------------------------------------------------------------------------

    def die(self, why: str) -> None:
        print(f"stub engine dies: {why}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self.abort("")

    def resume_generation(self) -> None:
        self.paused = False
        if self._unannounced:
            self.cache.announce_clear()
            self._unannounced = False
        if not self.hung:
            if self._step is None:
                self._decode()
            stalled, self._stalled = self._stalled, []
            for go_on in stalled:
                go_on()

    def hang(self) -> None:
        self.hung = True

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
                run.fail(CallError(503, "The request was aborted."))
