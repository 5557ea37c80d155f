"""The engines of one TP group, at most one of them active: the agent's hands."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from talaria.gpu import config
from talaria.gpu.agent.host import HostKv, Staged
from talaria.gpu.engine.backoff import Backoff, BackoffPolicy
from talaria.gpu.engine.engine import Engine, EngineState
from talaria.gpu.engine.errors import Busy, EngineFailed, SwitchFailed
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.engine.staging import Progress
from talaria.gpu.engine.switch import SwitchTimes, switch
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.memory.arenas import Arenas
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol.engine import Hello, ToEngine
from talaria.policy.snapshot import Residency

T = TypeVar("T")
_log = logging.getLogger(__name__)
_POLICY: Final = BackoffPolicy()
_DRAIN_S: Final = 5.0
_DRAIN_POLL_S: Final = 0.02
"""SGLang tells nobody when it has become idle: a flush that succeeds is the test."""
_RESIDENCY: Final = {EngineState.PARKED: Residency.PARKED, EngineState.SWITCHING: Residency.PARKED, EngineState.ACTIVE: Residency.ACTIVE}


class Supervisor:
    """Implements ``agent.host.Engines``. ``on_down(model, why)``: an engine has died, and nothing of it is left.

    Nothing is started behind the slot scheduler's back, since a start needs the whole group: a dead model is absent, and opened again
    when the scheduler says so, but not before its back-off has passed. ``memory`` keeps KV over switches, ``arenas``
    have the device memory that all models share.
    """

    def __init__(
        self, models: Mapping[str, config.Model], instance: config.Instance, settings: config.Engine, holds: HoldServer,
        on_down: Callable[[str, str], None], policy: BackoffPolicy = _POLICY, memory: MemoryServer | None = None,
        arenas: Arenas | None = None, staging_bytes_per_s: float = math.inf,
    ) -> None:  # fmt: skip
        self.engines = {
            name: Engine(
                name, models[name], instance, settings, holds, self._died, memory if models[name].family in config.KEPT_FAMILIES else None,
                arenas,
            )
            for name in instance.models
        }  # fmt: skip
        self._memory, self._arenas = memory, arenas
        self._staging = Progress(instance.tp)
        self._staging_bytes_per_s = staging_bytes_per_s
        if arenas is not None:
            arenas.on_staged = self._staging.heard
        self._most = instance.max_resident_models
        self._holds = holds
        self._on_down = on_down
        self._backoffs = {name: Backoff(policy) for name in self.engines}
        self._kills: set[asyncio.Task[None]] = set()

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start what may be resident, one after another: the first model last, so that it alone is active and all others are parked.

        A model whose engine fails stays absent and is tried again when it is opened. Raises EngineFailed where none starts.
        """
        for name in reversed(list(self.engines)[: self._most]):
            await self._start_aside(name, park=name != next(iter(self.engines)))
        if all(engine.state is EngineState.FAILED for engine in list(self.engines.values())[: self._most]):
            raise EngineFailed(self._backoffs[next(iter(self.engines))].why)

    async def _start_aside(self, name: str, *, park: bool) -> None:
        engine = self.engines[name]
        try:
            await self._opening(name, engine.start())
        except EngineFailed:
            return  # said there
        if park:
            try:
                await engine.park()
            except EngineFailed as error:
                _log.error("%s", error)

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()), *self._kills)

    # --- what they are ---------------------------------------------------------------------------------------------

    def residency(self, model: str) -> Residency:
        return _RESIDENCY.get(self.engines[model].state, Residency.ABSENT)

    def alive(self, model: str) -> bool:
        """Whether it takes requests, to hold them: active or parked."""
        return self.engines[model].state in _RESIDENCY

    def url(self, model: str) -> str:
        """Of its server. Raises EngineFailed where there is none."""
        if (url := self.engines[model].url) is None:
            raise EngineFailed(f"engine of {model!r} is not running")
        return url

    def limits(self, model: str) -> Hello:
        return self.engines[model].limits

    def refusal(self, model: str) -> str | None:
        """Why a call for the model had better not wait: its engine does not start. None where it may."""
        return self._backoffs[model].refusal(time.monotonic())

    def cached_tokens(self, model: str, prompt: PageChain) -> int:
        return self.engines[model].mirror.device_tokens(prompt)

    def kv_version(self, model: str) -> int:
        return self.engines[model].mirror.version

    def restorable_tokens(self, model: str, prompt: PageChain, from_tokens: int) -> int:
        return from_tokens if self._memory is None else self._memory.cached_tokens(model, prompt, from_tokens)

    def host_version(self) -> int:
        return 0 if self._memory is None else self._memory.store.version

    def host_kv(self) -> HostKv:
        if self._memory is None:
            return HostKv()
        store = self._memory.store
        return HostKv(store.used_bytes, store.capacity_bytes, store.restored_bytes, store.registry.evictions, store.failed_copies)

    def forget_host_kv(self) -> None:
        if self._memory is not None:
            self._memory.store.clear()

    # --- what they do ----------------------------------------------------------------------------------------------

    def send(self, model: str, message: ToEngine) -> None:
        self._holds.send(model, message)

    def stage(self, model: str, share: float) -> None:
        active = self._active()
        if self._arenas is not None and active is not None:
            self._staging.begin(active, model)
            self._arenas.stage(active, model, share * self._staging_bytes_per_s)

    def unstage(self) -> None:
        active = self._active()
        if self._arenas is not None and active is not None:
            self._staging.begin(active, "")
            self._arenas.stage(active, "", 0.0)

    def staged(self) -> Staged:
        return self._staging.figures(self._active())

    def _active(self) -> str | None:
        return next((name for name, engine in self.engines.items() if engine.state is EngineState.ACTIVE), None)

    async def switch(self, source: str | None, target: str) -> SwitchTimes:
        """As ``engine.switch``, but a source that is still busy is given a few seconds, and a target in its back-off is refused before
        anything is touched. Raises SwitchFailed."""
        backoff, until_s = self._backoffs[target], time.monotonic() + _DRAIN_S
        if not self.alive(target) and time.monotonic() < backoff.until_s:
            raise SwitchFailed(f"{target!r} is not started again yet: {backoff.why}")
        while True:
            try:
                attempt = switch(None if source is None else self.engines[source], self.engines[target])
                staged = self._staging.figures(source)
                times = await (attempt if self.alive(target) else self._opening(target, attempt))
                self._staging.begin("", "")
                return replace(times, staging_bytes_per_s=staged.bytes_per_s)
            except Busy as busy:
                if time.monotonic() >= until_s:
                    raise SwitchFailed(f"{source!r} cannot be parked: {busy}") from busy
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _opening(self, model: str, work: Coroutine[Any, Any, T]) -> T:
        """Do what starts the model's engine, and keep the book of its starts."""
        began_s = time.monotonic()
        _log.info("event=engine_starts model=%s", model)
        try:
            result = await work
        except EngineFailed as error:
            if error.model == model:
                self._backoffs[model].failed(str(error), time.monotonic())
                _log.error("event=engine_failed model=%s why=%s", model, error)
            raise
        self._backoffs[model].started(time.monotonic())
        _log.info("event=engine_started model=%s seconds=%.1f", model, time.monotonic() - began_s)
        return result

    async def flush(self, model: str) -> None:
        """Empty the prefix cache of the active, idle model; an engine that still lets go of a call is given a few seconds.

        Raises EngineFailed.
        """
        until_s = time.monotonic() + _DRAIN_S
        while True:
            try:
                return await self.engines[model].flush()
            except Busy as busy:
                if time.monotonic() >= until_s:
                    raise EngineFailed(f"{model!r} cannot be flushed: {busy}") from busy
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self, model: str) -> None:
        await self.engines[model].stop()

    def kill(self, model: str, why: str) -> None:
        """End an engine that hangs; ``on_down`` follows."""
        task = asyncio.create_task(self.engines[model].fail(why))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def reap(self, model: str) -> None:
        """Wait until a dead engine may be started again."""
        await asyncio.sleep(self._backoffs[model].until_s - time.monotonic())

    def _died(self, model: str, why: str) -> None:
        self._backoffs[model].failed(why, time.monotonic())
        self._on_down(model, why)
