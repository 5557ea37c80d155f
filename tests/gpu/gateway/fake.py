"""An agent that speaks ``protocol.agent`` and answers from canned bodies, and a gateway in front of some of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from talaria.gpu import config as cluster
from talaria.gpu.gateway.main import gateway
from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol.agent import now_s
from talaria.gpu.protocol.engine import ABI
from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, LineState, Residency, Tier
from tests.policy.clusters import model as model_snapshot
from tests.policy.clusters import snapshot as snapshot_of

T = TypeVar("T")

ADMIN = {"authorization": "Bearer root"}
TEST_S = 180.0
"""No test takes so long, however slow the machine."""
OUTPUT_TOKENS = 20


def run(test: Coroutine[Any, Any, T]) -> T:
    """The test on a loop of its own; it never hangs."""

    async def limited() -> T:
        async with asyncio.timeout(TEST_S):
            return await test

    return asyncio.run(limited())


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for a condition. Raises TimeoutError with ``what``."""
    try:
        async with asyncio.timeout(TEST_S / 2):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise TimeoutError(f"waited in vain: {what}") from None


def event(name: str | None, data: Any) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def chat(model: str, text: str) -> tuple[Any, list[bytes]]:
    base = {"id": "c1", "created": 1, "model": model}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}
    whole = {
        **base, "object": "chat.completion", "usage": usage,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
    }  # fmt: skip
    parts = [
        event(
            None, {**base, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
        )
        for word in text.split(" ")
    ]
    return whole, [*parts, event(None, b"[DONE]")]


def completion(model: str, text: str) -> tuple[Any, list[bytes]]:
    base = {"id": "t1", "object": "text_completion", "created": 1, "model": model}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    whole = {**base, "usage": usage, "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}]}
    parts = [
        event(None, {**base, "choices": [{"index": 0, "text": word, "finish_reason": None, "logprobs": None}]}) for word in text.split(" ")
    ]
    return whole, [*parts, event(None, b"[DONE]")]


def message(model: str, text: str) -> tuple[Any, list[bytes]]:
    usage = {"input_tokens": 10, "output_tokens": 2, "cache_read_input_tokens": 4}
    base = {"id": "m1", "type": "message", "role": "assistant", "model": model, "stop_reason": None, "stop_sequence": None, "usage": usage}
    whole = {**base, "stop_reason": "end_turn", "content": [{"type": "text", "text": text}]}
    deltas = [
        event("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}})
        for word in text.split(" ")
    ]
    return whole, [
        event("message_start", {"type": "message_start", "message": {**base, "content": []}}),
        event("content_block_start", {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        *deltas,
        event("content_block_stop", {"type": "content_block_stop", "index": 0}),
        event("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}),
        event("message_stop", {"type": "message_stop"}),
    ]


def response(model: str, text: str) -> tuple[Any, list[bytes]]:
    item = {
        "id": "i1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }  # fmt: skip
    whole = {
        "id": "r1", "object": "response", "created_at": 1, "model": model, "status": "completed", "output": [item], "tools": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    }  # fmt: skip
    deltas = [
        event("response.output_text.delta", {
            "type": "response.output_text.delta", "sequence_number": n, "item_id": "i1", "output_index": 0, "content_index": 0,
            "delta": word, "logprobs": [],
        })
        for n, word in enumerate(text.split(" "), 1)
    ]  # fmt: skip
    created = {"type": "response.created", "sequence_number": 0, "response": {**whole, "status": "in_progress", "output": []}}
    done = {"type": "response.completed", "sequence_number": 99, "response": whole}
    return whole, [event("response.created", created), *deltas, event("response.completed", done)]


BODIES = {"/v1/chat/completions": chat, "/v1/completions": completion, "/v1/messages": message, "/v1/responses": response}


@dataclass
class Submitted:
    """One submission as the agent saw it."""

    path: str
    seq: int
    call: Call
    document: dict[str, Any]
    deadline_s: float | None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Its client went away."""


async def at_once(submitted: Submitted) -> None:
    """Nothing to wait for."""


class FakeAgent:
    """Serves ``models``. ``before(submitted)`` runs before each answer, ``between`` before each further chunk of a stream."""

    def __init__(self, name: str, *models: str, key: str = "agent-key") -> None:
        self.name, self.models, self.key = name, models or ("m",), key
        self.submitted: list[Submitted] = []
        self.heard: list[wire.FromGateway] = []
        self.gateways: list[str] = []
        self.before: Callable[[Submitted], Awaitable[None]] = at_once
        self.between: Callable[[Submitted], Awaitable[None]] = at_once
        self.refuse: tuple[int, bytes] | None = None
        """Status and body for every call instead of an answer, in ``refusal_type``."""
        self.refusal_type = "application/json"
        self.break_off_after: int | None = None
        """Chunks of a stream before the connection breaks."""
        self.words = "it works well"
        self.leases: list[tuple[tuple[str, str, str, str], float, float]] = []
        self.lines: dict[LineKey, LineState] = {}
        self.silent_books = False
        self.beats = True
        self.healthy = True
        self.prompt_tokens: Callable[[Call], int] = lambda call: call.prompt_tokens
        self.requests = 0
        self.links = 0
        self.seen = 0
        self.version = 0
        self.changes: dict[str, Any] = {}
        """Fields of the snapshot that differ."""
        self._link: web.WebSocketResponse | None = None
        self._runner: web.ServerRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As if it had died."""
        if self._runner is not None:
            if self._link is not None:
                await self._link.close()
            await self._runner.cleanup()
            self._runner = None

    def forget_everything(self) -> None:
        """A new process of the same agent."""
        self.seen = self.version = 0
        self.lines, self.leases = {}, []
        self.gateways = []

    def snapshot(self) -> InstanceSnapshot:
        self.version += 1
        models = {name: model_snapshot(Residency.PARKED if n else Residency.ACTIVE) for n, name in enumerate(self.models)}
        made = snapshot_of(self.name, models, self.version, now_s(), seen_seq=self.seen, healthy=self.healthy, lines=dict(self.lines))
        return replace(made, **self.changes)

    async def publish(self) -> None:
        await self.tell(wire.Snapshot(json.dumps(CODEC.encode(self.snapshot())).encode()))

    async def tell(self, message: wire.FromAgent) -> None:
        if self._link is not None and not self._link.closed:
            await self._link.send_bytes(msgspec.msgpack.encode(message))

    async def drop_link(self) -> None:
        assert self._link is not None
        await self._link.close()

    async def _greet(self) -> None:
        hello = wire.AgentHello(self.name, "test", ABI, now_s(), b"{}", dict.fromkeys(self.models, 1000), self.leases)
        await self.tell(hello)
        await self.publish()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if request.path == wire.LINK_PATH:
            return await self._serve_link(request)
        self.requests += 1
        body = await request.read()
        header = request.headers.get(wire.SUBMIT_HEADER)
        if header is None:
            assert request.path == "/v1/messages/count_tokens", request.path
            return web.json_response({"input_tokens": len(body)})
        submit = msgspec.json.decode(header, type=wire.Submit)
        call = CODEC.decode(msgspec.json.decode(submit.call))
        asked = Submitted(request.path, submit.seq, call, json.loads(body), submit.deadline_s)
        self.submitted.append(asked)
        self.seen = max(self.seen, submit.seq)
        try:
            return await self._answer(request, asked)
        except (asyncio.CancelledError, ConnectionError):
            asked.gone.set()
            await self._books(asked, "failed", "the client went away")
            raise

    async def _answer(self, request: web.BaseRequest, asked: Submitted) -> web.StreamResponse:
        await self.before(asked)
        if self.refuse is not None:
            if self.refuse[0] != 503:
                await self._books(asked, "failed", "refused")
            return web.Response(status=self.refuse[0], body=self.refuse[1], content_type=self.refusal_type)
        whole, parts = BODIES[request.path](asked.document["model"], self.words)
        if not asked.document.get("stream"):
            await self._books(asked, "completed")
            return web.json_response(whole)
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for number, part in enumerate(parts):
            if number == self.break_off_after:
                assert request.transport is not None
                request.transport.close()
                await self._books(asked, "failed", "broke off")
                return stream
            if number:
                await self.between(asked)
            if number == len(parts) - 1:
                await self._books(asked, "completed")
            await stream.write(part)
        await stream.write_eof()
        return stream

    async def _books(self, asked: Submitted, outcome: str, why: str = "") -> None:
        call, now = asked.call, now_s()
        prompt = self.prompt_tokens(call)
        if outcome == "completed":
            self.lines[call.key] = LineState(Tier.DEVICE, prompt + OUTPUT_TOKENS, now)
        if self.silent_books:
            return
        await self.tell(
            wire.CallEnded(
                call.id, outcome, why, prompt, min(call.reusable_tokens, prompt), 0, 0, OUTPUT_TOKENS, now, now, now, False, 0, 0
            )
        )

    async def _serve_link(self, request: web.BaseRequest) -> web.StreamResponse:
        link = self._link = web.WebSocketResponse()
        await link.prepare(request)
        name = request.headers[wire.GATEWAY_HEADER]
        if self.gateways and self.gateways[-1] != name:
            self.seen = 0
        self.gateways.append(name)
        self.links += 1
        await self._greet()
        beating = asyncio.create_task(self._beat(link))
        try:
            await self._listen(link)
        finally:
            beating.cancel()
        return link

    async def _beat(self, link: web.WebSocketResponse) -> None:
        while not link.closed:
            await asyncio.sleep(0.5)
            if self.beats and not link.closed:
                await link.send_bytes(msgspec.msgpack.encode(wire.Beat(self.healthy)))

    async def _listen(self, link: web.WebSocketResponse) -> None:
        async for frame in link:
            if frame.type is aiohttp.WSMsgType.BINARY:
                heard = msgspec.msgpack.decode(frame.data, type=wire.FromGateway)
                self.heard.append(heard)
                if isinstance(heard, wire.Void):
                    self.seen = max(self.seen, heard.seq)
                if isinstance(heard, wire.Reset):
                    self.seen, self.version, self.lines, self.leases = 0, 0, {}, []
                    await self._greet()


@dataclass
class Rig:
    """A gateway at ``url`` in front of ``agents``, and a client."""

    url: str
    agents: tuple[FakeAgent, ...]
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> aiohttp.ClientResponse:
        """The answer, read."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.http.post(self.url + path, data=data, headers=headers)
        await answer.read()
        return answer

    async def get(self, path: str, headers: dict[str, str] | None = None) -> aiohttp.ClientResponse:
        answer = await self.http.get(self.url + path, headers=headers)
        await answer.read()
        return answer

    async def calls(self) -> dict[str, int]:
        """accepted, open, completed, failed, shed."""
        counts: dict[str, int] = (await (await self.get("/admin/instances", ADMIN)).json())["calls"]
        return counts

    async def settled(self) -> dict[str, int]:
        """The counts once no call is open; every accepted call has ended once."""
        while (counts := await self.calls())["open"]:
            await asyncio.sleep(0.005)
        assert counts["accepted"] == counts["completed"] + counts["failed"] + counts["shed"], counts
        return counts


def cluster_of(agents: tuple[FakeAgent, ...], **settings: Any) -> cluster.ClusterConfig:
    """``settings``: of the gateway; ``policy`` goes to the policy."""
    policy = settings.pop("policy", {})
    models = {name: {"path": "/nowhere"} for agent in agents for name in agent.models}
    instances = [{"name": item.name, "models": list(item.models), "url": item.url, "key": {"value": item.key}} for item in agents]
    document = {
        "schema": "talaria.cluster/1", "name": "test", "models": models, "instances": instances, "policy": policy,
        "gateway": {"port": 0, "admin_key": {"value": "root"}, **settings},
    }  # fmt: skip
    return cluster.check(document, "test")


@contextlib.asynccontextmanager
async def rig(*agents: FakeAgent, knobs: Knobs | None = None, ready: bool = True, **settings: Any) -> AsyncIterator[Rig]:
    """Everything running; ``settings`` as in ``cluster_of``. ``reload``: what a reload reads."""
    reload = settings.pop("reload", None)
    agents = agents or (FakeAgent("a"),)
    for agent in agents:
        if agent._runner is None:
            await agent.start()
    try:
        config = cluster_of(agents, **settings)
        async with (
            gateway(config, knobs or Knobs(), reload=reload) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TEST_S)) as http,
        ):
            made = Rig(url, agents, http)
            while ready and (await made.get("/ready")).status != 200:
                await asyncio.sleep(0.005)
            yield made
    finally:
        for agent in agents:
            await agent.stop()


CAPABILITIES = Capabilities()


def say(*texts: str, model: str = "m", **more: Any) -> dict[str, Any]:
    """A chat request: user and assistant in turns."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": model, "messages": messages, **more}
