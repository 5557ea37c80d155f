"""An instance agent as a child process, and a gateway's part played by hand: the link, leases and submissions."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from talaria.gpu.agent.main import Agent
from talaria.gpu.config import ClusterConfig, check
from talaria.gpu.protocol import agent as wire
from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import InstanceSnapshot

KEY = "key-of-tests"
TAU_S = 1.0
CHAT = "/v1/chat/completions"
PATIENCE_S = 180.0


class AgentProcess:
    """One running agent with its link up."""

    def __init__(self, http: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process | None = None) -> None:
        self.url, self.process = url, process
        self.heard: list[wire.FromAgent] = []
        self.ended: dict[int, wire.CallEnded] = {}
        self.keys: dict[int, LineKey] = {}
        self.snapshot: InstanceSnapshot | None = None
        self.tau_s = TAU_S
        self._http = http
        self._link: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._over = False
        """The link has ended: nothing more will be heard on it."""
        self._changed = asyncio.Condition()
        self._seq = 0
        self._calls = 0

    async def connect(self, gateway: str = "gateway") -> None:
        """Bring the link up anew."""
        self._over = False
        self._link = await self._http.ws_connect(f"{self.url}{wire.LINK_PATH}", headers={wire.GATEWAY_HEADER: gateway}, max_msg_size=0)
        self._reader = asyncio.create_task(self._read(self._link))

    async def disconnect(self) -> None:
        assert self._link is not None and self._reader is not None
        await self._link.close()
        await self._reader

    async def say(self, message: wire.FromGateway) -> None:
        assert self._link is not None
        await self._link.send_bytes(msgspec.msgpack.encode(message))

    async def _read(self, link: aiohttp.ClientWebSocketResponse) -> None:
        try:
            await self._hear(link)
        finally:
            self._over = True
            async with self._changed:
                self._changed.notify_all()

    async def _hear(self, link: aiohttp.ClientWebSocketResponse) -> None:
        decode = msgspec.msgpack.Decoder(wire.FromAgent).decode
        async for frame in link:
            message = decode(frame.data)
            if isinstance(message, wire.CallEnded):
                assert message.call not in self.ended, "a call ended twice"
                lease = wire.now_s() + self.tau_s if message.outcome == "completed" and self.tau_s else None
                await self.say(wire.Lease(tuple(self.keys[message.call]), lease))
                self.ended[message.call] = message  # whoever waits for it may close the link at once
            elif isinstance(message, wire.Snapshot):
                self.snapshot = CODEC.decode(json.loads(message.body))
            async with self._changed:
                self.heard.append(message)
                self._changed.notify_all()

    async def until(self, what: str, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
        """Wait for something heard."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: condition() or self._over)
            assert condition(), f"the link has ended before: {what}; last heard: {self.heard[-5:]}"
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; last heard: {self.heard[-5:]}") from None

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def submission(
        self, model: str, session: str, turn: int, *, estimate: int = 100, deadline_s: float | None = None
    ) -> tuple[int, dict[str, str]]:
        """Number of a new call and the headers of its submission."""
        self._seq += 1
        self._calls += 1
        key = LineKey("tests", session, model, "main")
        reusable = estimate // 2 if turn else 0
        continues = (("main", reusable),) if turn else ()
        call = Call(self._calls, key, turn, wire.now_s(), estimate, reusable, None, continues, deadline_s, False)
        self.keys[call.id] = key
        raw = msgspec.Raw(json.dumps(CODEC.encode(call)).encode())
        return call.id, {wire.SUBMIT_HEADER: msgspec.json.encode(wire.Submit(self._seq, raw, deadline_s)).decode()}

    async def call(
        self, model: str, session: str, body: dict[str, Any], *, turn: int = 0, path: str = CHAT, **how: Any
    ) -> tuple[int, int, bytes]:
        """(call, status, whole body) of one call, after its books have come too."""
        number, headers = self.submission(model, session, turn, **how)
        status, content = await self.call_with(headers, model, body, path)
        await self.until(f"books of call {number}", lambda: number in self.ended)
        return number, status, content

    async def end_lease(self, model: str, session: str) -> None:
        """No return of the session is expected any more."""
        await self.say(wire.Lease(("tests", session, model, "main"), None))

    async def call_with(self, headers: dict[str, str], model: str, body: dict[str, Any], path: str = CHAT) -> tuple[int, bytes]:
        """Status and whole body."""
        async with self.post(path, {"model": model, **body}, headers) as answer:
            return answer.status, await answer.read()

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        return self._http.post(self.url + path, json=body, headers=headers)

    async def get(self, path: str) -> Any:
        async with self._http.get(self.url + path) as answer:
            assert answer.status == 200
            return await (answer.json() if path == "/health" else answer.text())

    def engine_pid(self, model: str) -> int:
        """First process of the agent's engine of ``model``."""
        assert self.process is not None
        for pid in descendants(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "--served-model-name" in words and words[words.index("--served-model-name") + 1] == model and "warden.py" not in words[3]:
                return pid
        raise AssertionError(f"no engine of {model}")

    async def fault(self, model: str, name: str) -> None:
        """Make a stub engine fail on purpose."""
        words = Path(f"/proc/{self.engine_pid(model)}/cmdline").read_bytes().decode().split("\0")
        async with self._http.post(f"http://127.0.0.1:{words[words.index('--port') + 1]}/stub/{name}") as answer:
            assert answer.status == 200

    async def reset(self, knobs: Knobs, *, record: bool = True) -> None:
        """Begin anew, with numbers from 1."""
        before = len(self.of(wire.AgentHello))
        await self.say(wire.Reset(json.dumps(CODEC.encode(knobs)).encode(), True, record))
        self._seq = 0
        await self.until("the greeting after a reset", lambda: len(self.of(wire.AgentHello)) > before)


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


@asynccontextmanager
async def own_agent(cluster: ClusterConfig, name: str) -> AsyncIterator[tuple[AgentProcess, Agent]]:
    """The agent of instance ``name`` in this process, greeted once its engines are up."""
    (instance,) = [found for found in cluster.instances if found.name == name]
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    agent = Agent(cluster, instance, KEY)
    serving = asyncio.create_task(agent.serve(stop, port.set_result))
    try:
        await asyncio.wait({serving, port}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
            process = AgentProcess(http, f"http://127.0.0.1:{port.result()}")
            await process.connect()
            yield process, agent
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def agent_process(document: dict[str, Any], name: str) -> AsyncIterator[AgentProcess]:
    """The agent of instance ``name``, its engines up and greeted; nothing of it is left afterwards."""
    check(document, "the test's cluster")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "talaria.gpu.agent.main", name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, wire.KEY_VARIABLE: KEY},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(document).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            port = json.loads(await process.stdout.readline())["port"]
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
            agent = AgentProcess(http, f"http://127.0.0.1:{port}", process)
            await agent.connect()
            yield agent
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            raise
