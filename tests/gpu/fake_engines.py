"""The engines of a group in memory, timed by a profile: what the agent's core needs of them, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from talaria.gpu.agent.host import HostKv, Staged
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.engine.switch import SwitchTimes
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.kv.mirror import KvMirror
from talaria.gpu.protocol.engine import ABI, Drop, Ended, FromEngine, Grant, Held, Hello, Progress, Stop, ToEngine
from talaria.policy.snapshot import Residency
from talaria.policy.timing import Timing

MOST_STEPS = 16
"""Decode steps between two looks at what has been granted meanwhile."""


@dataclass(slots=True)
class _Call:
    id: str
    prompt: bytes
    limit: int
    output: list[int] = field(default_factory=list)
    steps_left: int = 0
    reported: int = 0
    cached_tokens: int = 0
    prefilled: bool = False
    stopping: bool = False
    drop: bool = False

    @property
    def tokens(self) -> bytes:
        return self.prompt + b"".join(token.to_bytes(4, "little") for token in self.output)

    @property
    def context_tokens(self) -> int:
        return len(self.prompt) // 4 + len(self.output)


class _Engine:
    def __init__(self, model: str, timing: Timing, say: Callable[[str, FromEngine], None], page_tokens: int) -> None:
        self.model = model
        self.residency = Residency.ABSENT
        self.calls: dict[str, _Call] = {}
        self.mirror = KvMirror(page_tokens)
        self._timing = timing
        self._say = say
        self._page_tokens = page_tokens
        self._running: list[_Call] = []
        self._granted: list[_Call] = []
        self._task: asyncio.Task[None] | None = None

    def hold(self, call: _Call) -> None:
        self.calls[call.id] = call
        self._say(self.model, Held(call.id, call.prompt, call.limit))

    def take(self, message: ToEngine) -> None:
        call = self.calls.get(message.call)
        if call is None:
            return
        if isinstance(message, Grant):
            call.steps_left = message.steps + (not call.output)
            call.prefilled = call.stopping = False
            self._granted.append(call)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run())
        elif isinstance(message, Stop):
            call.stopping = True
        elif isinstance(message, Drop):
            call.drop = True
            del self.calls[call.id]
            self._say(self.model, Ended(call.id, "failed", len(call.output), b"", 0, message.why))

    async def _run(self) -> None:
        while self._granted or self._running:
            if self._granted:
                await self._prefill(self._granted.pop(0))
            else:
                await self._decode()
        self._task = None

    async def _prefill(self, call: _Call) -> None:
        call.cached_tokens = self.mirror.device_tokens(PageChain(self._page_tokens, call.tokens))
        await asyncio.sleep(self._timing.prefill_s(call.context_tokens - call.cached_tokens, call.cached_tokens))
        self._store(call)
        self._running.append(call)
        call.reported = len(call.output)
        self._advance(call, 1)

    async def _decode(self) -> None:
        steps = min(MOST_STEPS, *(min(call.steps_left, call.limit - len(call.output)) for call in self._running))
        contexts = sum(call.context_tokens for call in self._running)
        await asyncio.sleep(self._timing.steps_s(steps, len(self._running), contexts))
        for call in list(self._running):
            self._advance(call, steps)

    def _advance(self, call: _Call, tokens: int) -> None:
        if call.drop:
            self._running.remove(call)
            return
        call.output += range(len(call.output), len(call.output) + tokens)
        call.steps_left -= tokens
        finished = len(call.output) >= call.limit
        if finished or call.stopping or call.steps_left <= 0:
            self._running.remove(call)
            self._store(call)
            reason = "finished" if finished else "grant" if call.steps_left <= 0 else "stopped"
            if finished:
                del self.calls[call.id]
            new = call.tokens[len(call.prompt) + 4 * call.reported :]
            self._say(self.model, Ended(call.id, reason, len(call.output), new, call.cached_tokens))
        else:
            self._say(self.model, Progress(call.id, len(call.output)))

    def _store(self, call: _Call) -> None:
        self.mirror.stored(PageChain(self._page_tokens, call.tokens).hashes)

    def idle(self) -> bool:
        return self._task is None

    def die(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.calls.clear()
        self._running.clear()
        self._granted.clear()
        self.mirror.cleared()
        self.residency = Residency.ABSENT


class FakeEngines:
    """Implements ``agent.host.Engines``. ``say`` and ``died`` are the instance's ears."""

    def __init__(self, timing: dict[str, Timing], opened: Sequence[str], *, page_tokens: int = 64, kv_tokens: int = 600_000) -> None:
        self._limits = Hello(ABI, "", 0, page_tokens, kv_tokens, 256, kv_tokens)
        self._timing = timing
        self.say: Callable[[str, FromEngine], None] = lambda model, message: None
        self.died: Callable[[str, str], None] = lambda model, why: None
        self.engines = {name: _Engine(name, curve, self._say, page_tokens) for name, curve in timing.items()}
        for name in opened:
            self.engines[name].residency = Residency.PARKED
        self.engines[opened[0]].residency = Residency.ACTIVE
        self.progress = Staged()
        self.failing: asyncio.Future[None] | None = None
        self.killed: list[str] = []
        self.refused: dict[str, str] = {}
        """Models that do not start, and why."""

    def _say(self, model: str, message: FromEngine) -> None:
        """Never from within a command: an engine is another process."""
        asyncio.get_running_loop().call_soon(self.say, model, message)

    def hold(self, model: str, call: str, prompt: bytes, limit: int) -> None:
        """A body has been posted and rendered."""
        if self.alive(model):
            self.engines[model].hold(_Call(call, prompt, limit))

    def active(self) -> str | None:
        return next((name for name, engine in self.engines.items() if engine.residency is Residency.ACTIVE), None)

    def crash(self, model: str) -> None:
        """The process dies; its agent hears of it."""
        self.engines[model].die()
        if self.failing is not None and not self.failing.done():
            self.failing.set_exception(EngineFailed(f"{model} died"))
        self.died(model, "the engine died")

    # --- what the core asks ----------------------------------------------------------------------------------------

    def residency(self, model: str) -> Residency:
        return self.engines[model].residency

    def alive(self, model: str) -> bool:
        return self.engines[model].residency is not Residency.ABSENT

    def refusal(self, model: str) -> str | None:
        return self.refused.get(model)

    def limits(self, model: str) -> Hello:
        return self._limits

    def cached_tokens(self, model: str, prompt: PageChain) -> int:
        return self.engines[model].mirror.device_tokens(prompt)

    def kv_version(self, model: str) -> int:
        return self.engines[model].mirror.version

    def restorable_tokens(self, model: str, prompt: PageChain, from_tokens: int) -> int:
        return from_tokens

    def host_version(self) -> int:
        return 0

    def host_kv(self) -> HostKv:
        return HostKv()

    def forget_host_kv(self) -> None:
        """There is none."""

    def send(self, model: str, message: ToEngine) -> None:
        self.engines[model].take(message)

    def stage(self, model: str, share: float) -> None:
        self.progress = Staged(model)

    def unstage(self) -> None:
        self.progress = Staged()

    def staged(self) -> Staged:
        return self.progress

    def kill(self, model: str, why: str) -> None:
        self.killed.append(model)
        self.crash(model)

    async def switch(self, source: str | None, target: str) -> SwitchTimes:
        opens = self.engines[target].residency is Residency.ABSENT
        self.progress = Staged()
        timing, started_s = self._timing[target], asyncio.get_running_loop().time()
        duration_s = timing.open_s if opens else timing.h2d_switch_s
        if source is not None:
            engine = self.engines[source]
            while not engine.idle():  # it still lets go of what was dropped
                await asyncio.sleep(0.001)
            engine.mirror.flushed()
            engine.residency = Residency.PARKED
        self.failing = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(duration_s):
                await self.failing
        except TimeoutError:
            self.engines[target].residency = Residency.ACTIVE
            self.engines[target].mirror.cleared()
            return SwitchTimes(started_s, (0.0, duration_s, 0.0, 0.0, 0.0), "open" if opens else "h2d")
        finally:
            self.failing = None
        raise AssertionError("unreachable")

    def fail_switch(self, why: str) -> None:
        """The switch under way does not succeed."""
        assert self.failing is not None
        self.failing.set_exception(EngineFailed(why))

    async def close(self, model: str) -> None:
        self.engines[model].die()

    async def reap(self, model: str) -> None:
        pass

    async def flush(self, model: str) -> None:
        self.engines[model].mirror.cleared()
