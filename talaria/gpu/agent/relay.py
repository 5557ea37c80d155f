"""The HTTP side of a call: the gateway's request goes on to the engine, and the engine's answer back, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from talaria.gpu import dialects
from talaria.gpu.agent.calls import AgentCall
from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.protocol.engine import CALL_HEADER
from talaria.gpu.serving import Stream
from talaria.gpu.upstream import Reply, Upstream, UpstreamFailed
from talaria.policy.calls import Call

LAST_WORD_S: Final = 30.0
"""How long a complete answer waits for the engine's own word that the call is over."""
CLIENT_GONE: Final = 499
_PASSED_HEADERS: Final = ("content-type", "content-encoding", "cache-control")
_ENDPOINTS: Final = {endpoint.path: endpoint for endpoint in (*dialects.CALLS, dialects.COUNT_TOKENS)}


@dataclass(frozen=True, slots=True)
class Failure:
    """The call's end by our own doing."""

    status: int
    why: str


def error_response(path: str, failure: Failure) -> web.Response:
    """An error in the format of the endpoint's clients."""
    problem = dialects.Problem(failure.status, failure.why, retry_after_s=2.0 if failure.status == 503 else None)
    body = _ENDPOINTS.get(path, dialects.OTHER).error_body(problem)
    return web.Response(status=failure.status, headers=problem.headers, body=body, content_type="application/json")


class Relay:
    """One call's way to its engine and back. It is the call's ``Client``."""

    def __init__(self, engines: Upstream, url: Callable[[str], str], request: web.BaseRequest, body: bytes) -> None:
        self.began = False
        self._engines, self._url = engines, url
        self._request, self._body = request, body
        self._orders: asyncio.Queue[str | Failure] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._reply: Reply | None = None
        self._failure: Failure | None = None

    def post(self, model: str) -> None:
        self._orders.put_nowait(model)

    def fail(self, status: int, why: str) -> None:
        self._failure = Failure(status, why)
        self._orders.put_nowait(self._failure)
        self._ended.set()
        if self._reply is not None:
            self._reply.close()

    def ended(self) -> None:
        """Should the engine's answer break off now, nobody else will give one."""
        self._ended.set()
        self._orders.put_nowait(Failure(502, "the engine broke off its answer"))

    async def run(self, instance: AgentInstance, call: Call, seq: int, deadline_s: float | None) -> web.StreamResponse:
        """The answer, complete. Its client's departure cancels this."""
        run = instance.submit(call, self, seq)
        timer = None
        if deadline_s is not None:
            due_s = max(0.0, deadline_s - instance.clock())
            timer = asyncio.get_running_loop().call_later(due_s, instance.end_early, run, 504, "the call's deadline has come")
        try:
            while True:
                order = await self._orders.get()
                order = self._failure or order  # an engine that is asked now would hold the call for nobody
                if isinstance(order, Failure):
                    return self._failed(order)
                try:
                    return await self._forward(instance, run, order)
                except (UpstreamFailed, EngineFailed, TimeoutError) as error:
                    if self._failure is None:  # else that is the next order
                        arrived = error.arrived if isinstance(error, UpstreamFailed) else isinstance(error, TimeoutError)
                        instance.connection_lost(run, arrived=arrived)
        finally:
            if timer is not None:
                timer.cancel()
            instance.end_early(run, CLIENT_GONE, "its client went away")

    def _failed(self, failure: Failure) -> web.StreamResponse:
        """A status where nothing was sent; else the answer breaks off, which the gateway words for its client."""
        if self.began and self._request.transport is not None:
            self._request.transport.abort()
        return error_response(self._request.path, failure)

    async def _forward(self, instance: AgentInstance, run: AgentCall, model: str) -> web.StreamResponse:
        """Post the body and pass the answer on. Raises UpstreamFailed where the engine breaks off, ConnectionError where the client
        does. What comes before the first token waits for it: until then an engine may die and another try be made."""
        headers = {CALL_HEADER: run.engine_id, "content-type": "application/json", "accept-encoding": "identity"}
        self._reply = reply = Reply()
        try:
            await self._engines.post(reply, self._url(model), self._request.raw_path, headers, self._body)
            stream = Stream(self._request, reply.status, _passed(reply)) if reply.is_stream else None
            early = b""
            while part := await reply.some():
                early += part
                if stream is not None and run.first_token_s >= 0.0:
                    self.began = True
                    stream.begin(early)
                    early = b""
                    await reply.pass_to(stream.give, stream.drained)
        finally:
            reply.close()
        if not run.ready:
            instance.answered(run, reply.status)
        async with asyncio.timeout(LAST_WORD_S):
            await self._ended.wait()
        if self._failure is not None:
            return self._failed(self._failure)
        if stream is not None and self.began:
            return stream.end()
        self.began = True
        return web.Response(status=reply.status, headers=_passed(reply), body=early)


async def pass_through(engines: Upstream, url: str, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """A request that generates nothing: no call."""
    reply = Reply()
    try:
        await engines.post(reply, url, request.raw_path, {"content-type": "application/json"}, body)
        return web.Response(status=reply.status, headers=_passed(reply), body=await reply.read())
    except UpstreamFailed:
        return error_response(request.path, Failure(503, "the engine did not answer"))
    finally:
        reply.close()


def _passed(reply: Reply) -> dict[str, str]:
    return {name: reply.headers[name] for name in _PASSED_HEADERS if name in reply.headers}
