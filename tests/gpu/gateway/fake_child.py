"""A fake agent as a child process: cluster on standard input, port on standard output, over when the input ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from talaria.gpu import config as cluster
from talaria.gpu.protocol.agent import KEY_VARIABLE
from tests.gpu.gateway.fake import FakeAgent


async def main() -> None:
    config = cluster.check(json.loads(sys.stdin.readline()), "standard input")
    agent = FakeAgent(sys.argv[1], *config.models, key=os.environ[KEY_VARIABLE])
    await agent.start()
    with (Path(config.models["m"].path) / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    print(json.dumps({"port": agent.port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await agent.stop()


asyncio.run(main())
