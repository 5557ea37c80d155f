"""``run_gateway``: the gateway as a process, from a cluster to an open port and back to nothing running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

import uvloop
from aiohttp import web

from talaria.errors import InputError
from talaria.gpu.config import ClusterConfig
from talaria.gpu.gateway.admin import Admin
from talaria.gpu.gateway.agents import Agent
from talaria.gpu.gateway.children import COMMAND, Child
from talaria.gpu.gateway.dispatch import Dispatcher
from talaria.gpu.gateway.metrics import Metrics
from talaria.gpu.gateway.server import GatewayServer
from talaria.gpu.gateway.settings import Settings
from talaria.gpu.serving import spare_collections
from talaria.gpu.stopping import stop_event
from talaria.policy.knobs import Knobs

WATCH_S: Final = 1.0
DRAIN_S: Final = 30.0
"""How long calls in flight may go on after the gateway was told to stop."""
BACKLOG: Final = 2048
KEEP_CONNECTION_S: Final = 75.0
LARGEST_HEADER_BYTES: Final = 32_768


def run_gateway(
    config: ClusterConfig,
    knobs: Knobs,
    *,
    reload: Callable[[], ClusterConfig] | None = None,
    at_eof: bool = False,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until told to stop (``stop_event``); ``on_ready`` is told the address. Raises InputError where port or key cannot be had."""
    uvloop.run(_serve(config, knobs, reload, on_ready, at_eof=at_eof))


async def _serve(
    config: ClusterConfig, knobs: Knobs, reload: Callable[[], ClusterConfig] | None, on_ready: Callable[[str], None], *, at_eof: bool
) -> None:
    stop = stop_event(at_eof=at_eof)
    async with gateway(config, knobs, reload=reload) as url:
        on_ready(url)
        await stop.wait()


@contextlib.asynccontextmanager
async def gateway(
    config: ClusterConfig, knobs: Knobs, *, reload: Callable[[], ClusterConfig] | None = None, agent_command: tuple[str, ...] = COMMAND
) -> AsyncIterator[str]:
    """A running gateway's address, on the running loop. Leaving it waits for calls in flight and stops its child agents."""
    dispatcher = Dispatcher(config, Settings(config), knobs, Metrics())
    admin = Admin(dispatcher, config, knobs, reload)
    server = GatewayServer(dispatcher, admin)
    web_server = web.Server(
        server.handle, handler_cancellation=True, auto_decompress=False, access_log=None, keepalive_timeout=KEEP_CONNECTION_S,
        max_line_size=LARGEST_HEADER_BYTES, max_field_size=LARGEST_HEADER_BYTES,
    )  # fmt: skip
    runner = web.ServerRunner(web_server, shutdown_timeout=DRAIN_S)
    await runner.setup()
    site = web.TCPSite(runner, config.gateway.host, config.gateway.port, backlog=BACKLOG)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        where = f"gateway: {config.gateway.host}:{config.gateway.port}"
        raise InputError(f"cannot listen: {error.strerror or error}", where=where, fix="choose another gateway.port") from None
    tasks = [asyncio.create_task(_watch(dispatcher))]
    try:
        agents = _agents(config, dispatcher)
        children = [Child(agent, lambda: admin.config, agent_command) for agent in agents if agent.url is None]
        tasks += [asyncio.create_task(child.run()) for child in children]
        tasks += [asyncio.create_task(agent.run()) for agent in agents]
        spare_collections()
        host = f"[{config.gateway.host}]" if ":" in config.gateway.host else config.gateway.host
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        server.stopping = True
        admin.stop()
        await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for instance in dispatcher.instances.values():
            await instance.agent.close()


def _agents(config: ClusterConfig, dispatcher: Dispatcher) -> list[Agent]:
    agents = []
    for item in config.instances:
        key = None if item.key is None else item.key.read(f"instances: {item.name}")
        agents.append(Agent(item.name, dispatcher.name, dispatcher, item.url, key))
        dispatcher.add(agents[-1])
    return agents


async def _watch(dispatcher: Dispatcher) -> None:
    while True:
        dispatcher.watch()
        await asyncio.sleep(WATCH_S)
