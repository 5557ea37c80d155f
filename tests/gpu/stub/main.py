"""A fast stand-in for an SGLang server with the plugin in it, for load and fault tests: one process, no model.

Takes the command line of ``python -m sglang.launch_server``; see ``options`` for its timing and ``server`` for faults on purpose.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import uvloop

from tests.gpu.stub.engine import Engine
from tests.gpu.stub.hold import Hold
from tests.gpu.stub.http import Connection, sweep
from tests.gpu.stub.options import Options, parse
from tests.gpu.stub.server import Server

SUBSCRIBE_S = 0.3
"""Subscribers of KV events that were there first find the socket in this time; a model takes longer to load."""


async def serve(options: Options) -> None:
    engine = Engine(options)
    await asyncio.sleep(max(options.timing.start_s, SUBSCRIBE_S))
    hold, loop = Hold(engine), asyncio.get_running_loop()
    server, connections = Server(engine, hold), set[Connection]()
    listening = await loop.create_server(lambda: Connection(connections, server.handle), options.host, options.port, backlog=2048)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    ending = asyncio.create_task(over.wait())
    work = [asyncio.create_task(sweep(connections))]
    work += [asyncio.create_task(engine.cache.publisher.replay())] if "replay_endpoint" in options.kv_events else []
    work += [asyncio.create_task(hold.serve(options.socket))] if options.socket else []
    done, _ = await asyncio.wait([ending, *work], return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        task.cancel()
    listening.close()
    for task in done:
        task.result()


if __name__ == "__main__":
    uvloop.run(serve(parse(sys.argv[1:])))
