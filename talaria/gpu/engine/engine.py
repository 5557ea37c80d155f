"""One SGLang server of one model on a TP group."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import aiohttp

from talaria.gpu import config
from talaria.gpu.engine import command, process
from talaria.gpu.engine.control import Control
from talaria.gpu.engine.errors import Busy, EngineFailed
from talaria.gpu.engine.guard import TAGS, IllegalStep
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.kv.events import KvEvents
from talaria.gpu.kv.mirror import KvMirror
from talaria.gpu.memory.arenas import Arenas, RankTimes
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol.engine import ABI, Hello

_RECORDS_S: Final = 30.0
"""Ranks that say nothing of a switch for so long do not work."""
_READY_POLL_S: Final = 0.2
"""SGLang's server tells nobody when it is ready: it can only be asked."""


class EngineState(Enum):
    ABSENT = "absent"
    """No process."""
    STARTING = "starting"
    PARKED = "parked"
    """Paused, its memory given back."""
    ACTIVE = "active"
    SWITCHING = "switching"
    """Between parked and active, either way."""
    FAILED = "failed"
    """No process, and not by our wish."""


class Activated(NamedTuple):
    phases_s: tuple[float, float, float, float]
    """Weights, KV pool, graphs, and going on, between answers of its server."""
    ranks: tuple[RankTimes, ...] = ()
    """What the ranks of an arena say themselves."""


class Engine:
    """Start, park and activate it from one task at a time; ``stop`` and ``fail`` may come in between.

    ``on_down(model, why)`` is called when its processes have ended though nobody stopped it, but not for a start that fails. ``memory``
    is the host pool that keeps its KV, ``arenas`` has the device memory that it shares, if there are any.
    """

    def __init__(
        self, name: str, model: config.Model, instance: config.Instance, settings: config.Engine, holds: HoldServer,
        on_down: Callable[[str, str], None], memory: MemoryServer | None = None, arenas: Arenas | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.state = EngineState.ABSENT
        self.mirror = KvMirror(settings.page_tokens)
        self._model, self._instance, self._settings, self._holds, self._on_down = model, instance, settings, holds, on_down
        self._memory, self._arenas = memory, arenas
        self._run: _Run | None = None
        self._hello: Hello | None = None

    @property
    def url(self) -> str | None:
        """Where its server listens; None without one."""
        return self._run.place.url if self._run else None

    @property
    def pid(self) -> int | None:
        """Of its first process, and of its process group."""
        return self._run.process.pid if self._run else None

    @property
    def limits(self) -> Hello:
        """What its plugin said at the last start. Raises EngineFailed where it never was up."""
        if self._hello is None:
            raise EngineFailed(f"engine of {self.name!r} has never been up")
        return self._hello

    async def start(self) -> None:
        """From absent or failed to active. Raises EngineFailed with its own complaint; then it is failed, and no process is left."""
        self._expect(EngineState.ABSENT, EngineState.FAILED)
        self.state = EngineState.STARTING
        self.mirror = KvMirror(self._settings.page_tokens)
        try:
            self._hello = await self._begin()
        except (EngineFailed, OSError) as error:
            stopped = self.state is not EngineState.STARTING
            await self._end(self.state if stopped else EngineState.FAILED)
            what = "was stopped while it started" if stopped else f"does not start: {error}"
            raise EngineFailed(f"engine of {self.name!r} {what}", "" if stopped else self.name) from error
        except BaseException:
            await self._end(EngineState.ABSENT)
            raise
        self.state = EngineState.ACTIVE

    async def _begin(self) -> Hello:
        """Its processes, and what the plugin in them says. Raises EngineFailed, OSError."""
        pool = None if self._memory is None else self._memory.path
        arena = None if self._arenas is None else self._arenas.path
        run = self._run = await _Run.begin(self.name, self._model, self._instance, self._settings, self._holds, pool, arena, self.mirror)
        if self.state is EngineState.STARTING:
            hello = await run.up(self.name, self._holds, self._settings.start_timeout_s)
            if self._run is run:
                self.mirror.page_tokens = hello.page_tokens
                run.watch = asyncio.create_task(self._watched(run))
                return hello
        raise EngineFailed("it was stopped")

    async def stop(self) -> None:
        """End all its processes, whatever it is doing."""
        await self._end(EngineState.ABSENT)

    async def fail(self, why: str) -> None:
        """Kill it, since it hangs or answers what it must not: failed, and ``on_down`` is called."""
        if self._run is not None:
            await self._end(EngineState.FAILED)
            self._on_down(self.name, why)

    async def park(self) -> float:
        """From active to parked; returns seconds. Raises Busy, and it stays active; EngineFailed, and it is failed."""
        self._expect(EngineState.ACTIVE)
        started_s = time.monotonic()
        async with self._switching(EngineState.PARKED) as control:
            await self._empty(control)
            await control.release()
        return time.monotonic() - started_s

    async def flush(self) -> None:
        """Empty the prefix cache of an active, idle engine. Raises Busy, and nothing has changed; EngineFailed, and it is failed."""
        self._expect(EngineState.ACTIVE)
        async with self._switching(EngineState.ACTIVE) as control:
            await self._empty(control)
            await control.go_on()

    async def _empty(self, control: Control) -> None:
        """Pause and flush, which succeeds only where nothing runs; else go on."""
        await control.pause()
        try:
            await control.flush()
        except Busy:
            await control.go_on()
            raise
        self.mirror.flushed()

    async def activate(self) -> Activated:
        """From parked to active. Raises EngineFailed, and it is failed."""
        self._expect(EngineState.PARKED)
        times_s = [time.monotonic()]
        async with self._switching(EngineState.ACTIVE) as control:
            for tag in TAGS:
                await control.resume(tag)
                times_s.append(time.monotonic())
            await control.go_on()
            times_s.append(time.monotonic())
            ranks = await asyncio.wait_for(self._arenas.switched(self.name), _RECORDS_S) if self._arenas is not None else []
        weights_s, pool_s, graphs_s, publish_s = (after - before for before, after in itertools.pairwise(times_s))
        return Activated((weights_s, pool_s, graphs_s, publish_s), tuple(ranks))

    @contextlib.asynccontextmanager
    async def _switching(self, after: EngineState) -> AsyncIterator[Control]:
        """Inside, requests change what the engine holds; one that fails leaves nothing that could be trusted."""
        run, before = self._running(), self.state
        self.state = EngineState.SWITCHING
        try:
            yield run.control
        except Busy:
            self.state = before
            raise
        except BaseException as error:
            why = f"engine of {self.name!r} is lost between {before.value} and {after.value}: {error!r}; {process.complaint(run.log)}"
            await self.fail(why)
            if isinstance(error, (aiohttp.ClientError, OSError, IllegalStep)):
                raise EngineFailed(why) from error
            raise
        if self._run is not run:
            raise EngineFailed(f"engine of {self.name!r} ended between {before.value} and {after.value}")
        self.state = after

    def _expect(self, *states: EngineState) -> None:
        if self.state not in states:
            raise EngineFailed(f"engine of {self.name!r} is {self.state.value}, not {' or '.join(state.value for state in states)}")

    def _running(self) -> _Run:
        if self._run is None:
            raise EngineFailed(f"engine of {self.name!r} is not running")
        return self._run

    async def _watched(self, run: _Run) -> None:
        """The processes ended by themselves."""
        status = await run.process.wait()
        if self._run is run:
            run.watch = None
            why = f"engine of {self.name!r} ended with status {status}: {process.complaint(run.log)}"
            await self._end(EngineState.FAILED)
            self._on_down(self.name, why)

    async def _end(self, state: EngineState) -> None:
        run, self._run = self._run, None
        self.state = state
        self.mirror.flushed()
        if run is not None:
            await run.end()


class _Run:
    """One start of an engine: everything that ends with its processes."""

    def __init__(self, place: command.Place, log: Path, running: process.Process, mirror: KvMirror) -> None:
        self.place, self.log, self.process = place, log, running
        self.control = Control(place.url, place.admin_key)
        self.watch: asyncio.Task[None] | None = None
        self._events = KvEvents(place.kv_events, place.kv_replay, mirror)

    @classmethod
    async def begin(
        cls, name: str, model: config.Model, instance: config.Instance, settings: config.Engine, holds: HoldServer, pool: Path | None,
        arena: Path | None, mirror: KvMirror,
    ) -> _Run:  # fmt: skip
        """Spawn the processes. Raises OSError."""
        if Path(model.path).is_absolute() and not Path(model.path).is_dir():  # SGLang would take it for a name on a hub
            raise FileNotFoundError(f"no model at {model.path}")
        assert holds.path is not None, "the hold server listens before any engine starts"
        place = command.Place(command.free_port(), Path(tempfile.mkdtemp(prefix="talaria-")), secrets.token_hex(24), pool, arena)
        try:
            log = process.fresh_log(Path(settings.log_dir), f"{instance.name}-{quote(name, safe='')}")
            words = command.command(name, model, instance, settings, place)
            environment = command.environment(name, model, instance, settings, place, holds.path)
            running = await process.Process.start(words, environment, place.directory, log)
            try:
                return cls(place, log, running, mirror)
            except BaseException:
                await running.kill()
                raise
        except BaseException:
            shutil.rmtree(place.directory, ignore_errors=True)
            raise

    async def up(self, name: str, holds: HoldServer, within_s: float) -> Hello:
        """Wait until the server takes calls and its plugin holds them. Raises EngineFailed."""
        self._events.start()
        ready = asyncio.ensure_future(self._ready(name, holds))
        ended = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait([ready, ended], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                what = f"it ended with status {ended.result()}" if ended.done() else f"it was not ready after {within_s:g} s"
                raise EngineFailed(f"{what}: {process.complaint(self.log)}")
            hello = ready.result()
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
            process.mask(self.log, self.place.admin_key)
        if hello.abi != ABI:
            raise EngineFailed(f"its plugin has ABI {hello.abi}, this agent speaks {ABI}")
        return hello

    async def _ready(self, name: str, holds: HoldServer) -> Hello:
        while not self._is_ours(hello := await holds.hello(name)):  # of an earlier start, whose loss is still to be heard
            await asyncio.sleep(_READY_POLL_S)
        while not await self.control.ready():
            await asyncio.sleep(_READY_POLL_S)
        return hello

    def _is_ours(self, hello: Hello) -> bool:
        try:
            return os.getpgid(hello.pid) == self.process.pid
        except ProcessLookupError:
            return False

    async def end(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        await self.process.kill()
        await self._events.stop()
        await self.control.close()
