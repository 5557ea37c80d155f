"""Agents of the gateway's own host: started as child processes, started again when they die, stopped with the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import Final

from talaria.gpu.config import ClusterConfig
from talaria.gpu.gateway.agents import Agent
from talaria.gpu.protocol.agent import CLOCK_VARIABLE, KEY_VARIABLE, clock_s

FIRST_RESTART_S: Final = 1.0
LONGEST_RESTART_S: Final = 60.0
STOP_S: Final = 60.0
"""An agent stops its engines first."""
STEADY_S: Final = 60.0
"""One that lived so long is not restarted more slowly than the first time."""
BAD_INPUT: Final = 2
"""Its exit code for what no start mends: a port that is taken, a model's folder that is not there. It has said what."""
LONGEST_READ_BYTES: Final = 65_536
COMMAND: Final = (sys.executable, "-m", "talaria.gpu.agent.main")

_log = logging.getLogger("talaria.gateway")


class Child:
    """Supervises the agent of one instance; ``command`` is followed by the instance's name. Each life begins with ``config`` as it is."""

    def __init__(self, agent: Agent, config: Callable[[], ClusterConfig], command: tuple[str, ...] = COMMAND) -> None:
        self._agent, self._config, self._command = agent, config, command
        self._process: asyncio.subprocess.Process | None = None
        agent.key = secrets.token_urlsafe(32)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep the agent running until cancelled; then it is stopped. One that ends with ``BAD_INPUT`` is given up."""
        loop, wait_s = asyncio.get_running_loop(), FIRST_RESTART_S
        try:
            while True:
                began_s = loop.time()
                try:
                    code: int | str = await self._one_life()
                except (OSError, ValueError) as error:  # it cannot be started, or does not say where it listens
                    code = type(error).__name__
                    await self._stop()
                self._agent.moved(None)
                if code == BAD_INPUT:
                    _log.error("event=agent_given_up instance=%s code=%s fix=what it says above, then restart", self._agent.name, code)
                    return
                if loop.time() - began_s > STEADY_S:
                    wait_s = FIRST_RESTART_S
                _log.error("event=agent_ended instance=%s code=%s restart_s=%.0f", self._agent.name, code, wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(LONGEST_RESTART_S, 2.0 * wait_s)
        finally:
            await self._stop()

    async def _one_life(self) -> int:
        assert self._agent.key is not None
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, self._agent.name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, KEY_VARIABLE: self._agent.key, CLOCK_VARIABLE: repr(clock_s())}, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(self._config().model_dump(mode="json", by_alias=True)).encode() + b"\n")
            await process.stdin.drain()
        port = _port(await process.stdout.readline())
        if port is not None:
            self._agent.moved(f"http://127.0.0.1:{port}")
        while await process.stdout.read(LONGEST_READ_BYTES):
            pass  # what else it prints there is nobody's business, but must not fill the pipe
        return await process.wait()

    async def _stop(self) -> None:
        """Its input ends, which tells it to stop; one that does not listen is killed."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            _log.error("event=agent_killed instance=%s", self._agent.name)
            process.kill()
            await process.wait()


def _port(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["port"])
    except (ValueError, KeyError, TypeError):
        return None
