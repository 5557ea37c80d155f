"""A fast stand-in for an SGLang server with the plugin in it, for load and fault tests: one process, no model.

Takes the command line of ``python -m sglang.launch_server``; see ``options`` for its timing and ``server`` for faults on purpose.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop
from aiohttp import web

from tests.gpu.stub.engine import Engine
from tests.gpu.stub.hold import Hold
from tests.gpu.stub.options import Options, parse
from tests.gpu.stub.server import Server

KEEP_ALIVE_S = 5.0
"""As uvicorn has it: a pooled connection may close just when it is used."""

SUBSCRIBE_S = 0.3
"""Subscribers of KV events that were there first find the socket in this time; a model takes longer to load."""


async def serve(options: Options) -> None:
    engine = Engine(options)
    await asyncio.sleep(max(options.timing.start_s, SUBSCRIBE_S))
    hold = Hold(engine)
    runner = web.AppRunner(Server(engine, hold).application(), access_log=None, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, backlog=2048, shutdown_timeout=1.0).start()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    ending = asyncio.create_task(over.wait())
    work = [asyncio.create_task(engine.cache.publisher.replay())] if "replay_endpoint" in options.kv_events else []
    work += [asyncio.create_task(hold.serve(options.socket))] if options.socket else []
    done, _ = await asyncio.wait([ending, *work], return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        task.cancel()
    await runner.cleanup()
    for task in done:
        task.result()


if __name__ == "__main__":
    uvloop.run(serve(parse(sys.argv[1:])))
