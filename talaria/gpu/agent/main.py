"""``run_agent``: one instance agent as a process, from its engines' start to nothing left behind.

As a gateway's child (``python -m talaria.gpu.agent.main NAME``) it reads its cluster from standard input and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Final

import uvloop

from talaria.errors import InputError, unknown_name
from talaria.gpu import config
from talaria.gpu.agent.beliefs import capabilities_of, knobs_of, staging_rate, timing_of
from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.agent.place import own_directory
from talaria.gpu.agent.server import AgentServer, listening
from talaria.gpu.agent.telemetry import Outbox, Telemetry
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.engine.supervisor import Supervisor
from talaria.gpu.memory.arenas import Arenas
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.protocol.agent import KEY_VARIABLE, now_s
from talaria.gpu.protocol.engine import FromEngine
from talaria.gpu.serving import spare_collections
from talaria.gpu.stopping import stop_event
from talaria.gpu.upstream import Upstream

WATCH_S: Final = 1.0
IDLE_CONNECTION_S: Final = 3.0
"""Shorter than an engine keeps an idle connection."""
CONNECT_S: Final = 10.0
LOST_S: Final = 2.0
"""How long an engine may be without its connection before it is taken for broken."""
_log = logging.getLogger("talaria.agent")


class Agent:
    """The parts of one agent, and what holds them together while it runs."""

    def __init__(self, cluster: config.ClusterConfig, instance: config.Instance, key: str | None) -> None:
        self._cluster, self._config, self._key = cluster, instance, key
        self._outbox = Outbox()
        self._telemetry = Telemetry(self._outbox, now_s)
        self._holds = HoldServer(self._heard, self._lost)
        models = {name: cluster.models[name] for name in instance.models}
        self._memory = MemoryServer(instance.host_kv_bytes, instance.tp, lost=self._lost) if instance.host_kv_bytes else None
        arena = instance.arena
        self.arenas = None if arena is None else Arenas(instance.tp, arena.chunks, arena.chunk_bytes, check=arena.check, lost=self._lost)
        self.engines = Supervisor(
            models, instance, cluster.engine, self._holds, self._died, memory=self._memory, arenas=self.arenas,
            staging_bytes_per_s=staging_rate(cluster, instance),
        )  # fmt: skip
        self._instance: AgentInstance | None = None

    async def serve(self, stop: asyncio.Event, on_port: Callable[[int], None]) -> None:
        """Until ``stop``. Raises OSError where the port cannot be had."""
        async with contextlib.AsyncExitStack() as stack:
            calls = Upstream(IDLE_CONNECTION_S, CONNECT_S)
            stack.callback(calls.close)
            directory = stack.enter_context(own_directory())
            await self._holds.start(directory / "hold")
            stack.push_async_callback(self._holds.stop)
            if self._memory is not None:
                await self._memory.start(directory / "memory")
                stack.push_async_callback(self._memory.stop)
            if self.arenas is not None:
                await self.arenas.start(directory / "arena")
                stack.push_async_callback(self.arenas.stop)
            stack.push_async_callback(self.engines.stop)
            server = AgentServer(calls, self.engines.url, self._key, self._outbox, self._telemetry)
            on_port(await stack.enter_async_context(listening(server, self._config.host, self._config.port)))
            tasks = [asyncio.create_task(self._run(server)), asyncio.create_task(stop.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if tasks[0] in done:
                    tasks[0].result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, server: AgentServer) -> None:
        """Start the engines, then watch over them."""
        beliefs, sizes = timing_of(self._cluster, self._config)
        try:
            await self.engines.start()
        except EngineFailed as error:
            _log.error("event=no_engine why=%s", error)
        capabilities = capabilities_of(self._cluster, self._config)
        instance = AgentInstance(
            self._config.name, capabilities, self.engines, beliefs, sizes, knobs_of(self._cluster.policy), self._telemetry, now_s
        )
        self._instance = self._telemetry.instance = instance
        server.begin(instance)
        spare_collections()
        async with asyncio.TaskGroup() as tasks:  # an agent that cannot do one of them must not look well
            tasks.create_task(self._telemetry.heartbeats())
            tasks.create_task(self._watch(instance))

    async def _watch(self, instance: AgentInstance) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            model = instance.group.hung(self._cluster.engine.hang_s)
            if model is not None:
                _log.error("event=engine_hangs model=%s", model)

    # --- what engines say ------------------------------------------------------------------------------------------

    def _heard(self, model: str, message: FromEngine) -> None:
        if self._instance is not None:
            self._instance.heard(model, message)

    def _lost(self, model: str) -> None:
        """Its process has most likely ended, which will be told with its reasons; if not, its calls are gone all the same."""
        pid = self.engines.engines[model].pid
        asyncio.get_running_loop().call_later(LOST_S, self._still_lost, model, pid)

    def _still_lost(self, model: str, pid: int | None) -> None:
        if pid is not None and self.engines.engines[model].pid == pid:
            self.engines.kill(model, f"the engine of {model!r} has lost its connection to the agent")

    def _died(self, model: str, why: str) -> None:
        _log.error("event=engine_died model=%s why=%s", model, why)
        if self._instance is not None:
            self._instance.group.died(model, why)


def run_agent(cluster: config.ClusterConfig, instance: config.Instance, *, at_eof: bool) -> None:
    """Serve ``instance`` for a gateway elsewhere until told to stop (``stop_event``). Raises InputError where key or port cannot be had."""
    key = None if instance.key is None else instance.key.read(f"instances: {instance.name}: key")
    if key is None and not config.is_loopback(instance.host):
        raise InputError(f"instance {instance.name!r} listens on {instance.host} without a key", where="instances", fix="add a key")
    uvloop.run(_serve(cluster, instance, key, lambda port: None, at_eof=at_eof))


async def _serve(
    cluster: config.ClusterConfig, instance: config.Instance, key: str | None, on_port: Callable[[int], None], *, at_eof: bool
) -> None:
    stop = stop_event(at_eof=at_eof)
    try:
        await Agent(cluster, instance, key).serve(stop, on_port)
    except OSError as error:
        where = f"instance {instance.name}: {instance.host}:{instance.port}"
        raise InputError(f"cannot listen: {error.strerror or error}", where=where, fix="choose another port") from None


def main() -> int:
    """A gateway's child."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    name = sys.argv[1]
    try:
        cluster = config.check(json.loads(_first_line()), "standard input")
        instance = next((found for found in cluster.instances if found.name == name), None)
        if instance is None:
            raise unknown_name("instance", name, [found.name for found in cluster.instances])
        key = os.environ.pop(KEY_VARIABLE, None)
        uvloop.run(_serve(cluster, instance, key, lambda port: print(json.dumps({"port": port}), flush=True), at_eof=True))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _first_line() -> bytes:
    """From standard input, and not a byte more."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
