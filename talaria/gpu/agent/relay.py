"""The HTTP side of a call: the gateway's request goes on to the engine, and the engine's answer back, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import web

from talaria.gpu import dialects
from talaria.gpu.agent.calls import AgentCall
from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.protocol.engine import CALL_HEADER
from talaria.gpu.serving import client_may_go
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

    def __init__(self, http: aiohttp.ClientSession, url: Callable[[str], str], request: web.BaseRequest, body: bytes) -> None:
        self.began = False
        self._http, self._url = http, url
        self._request, self._body = request, body
        self._orders: asyncio.Queue[str | Failure] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._attempt: asyncio.Task[web.StreamResponse] | None = None

    def post(self, model: str) -> None:
        self._orders.put_nowait(model)

    def fail(self, status: int, why: str) -> None:
        self._orders.put_nowait(Failure(status, why))
        if self._attempt is not None:
            self._attempt.cancel()

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
                if isinstance(order, Failure):
                    return self._failed(order)
                self._attempt = asyncio.create_task(self._forward(instance, run, order))
                await asyncio.wait({self._attempt})
                if not self._attempt.cancelled():  # else the next order says why
                    try:
                        return self._attempt.result()
                    except (aiohttp.ClientError, EngineFailed, TimeoutError):
                        instance.connection_lost(run)
        finally:
            if timer is not None:
                timer.cancel()
            if self._attempt is not None:
                self._attempt.cancel()
                await asyncio.gather(self._attempt, return_exceptions=True)
            instance.end_early(run, CLIENT_GONE, "its client went away")

    def _failed(self, failure: Failure) -> web.StreamResponse:
        """A status where nothing was sent; else the answer breaks off, which the gateway words for its client."""
        if self.began and self._request.transport is not None:
            self._request.transport.abort()
        return error_response(self._request.path, failure)

    async def _forward(self, instance: AgentInstance, run: AgentCall, model: str) -> web.StreamResponse:
        """Post the body and pass the answer on. Raises aiohttp.ClientError where the engine breaks off, ConnectionError where the client
        does. What comes before the first token waits for it: until then an engine may die and another try be made."""
        headers = {CALL_HEADER: run.engine_id, "content-type": "application/json", "accept-encoding": "identity"}
        async with self._http.post(self._url(model) + self._request.path, data=self._body, headers=headers) as answer:
            response, early = _begun_like(answer), b""
            read = answer.content.readany
            while chunk := await read():
                if not self.began and run.first_token_s < 0.0:
                    early += chunk
                    continue
                await self._write(response, early + chunk)
                early = b""
            if not run.ready:
                instance.answered(run, answer.status)
            async with asyncio.timeout(LAST_WORD_S):
                await self._ended.wait()
            await self._write(response, early)
            with client_may_go():
                await response.write_eof()
            return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        with client_may_go():
            if not self.began:
                self.began = True
                await response.prepare(self._request)
            if data:
                await response.write(data)


async def pass_through(http: aiohttp.ClientSession, url: str, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """A request that generates nothing: no call."""
    try:
        async with http.post(url + request.path, data=body, headers={"content-type": "application/json"}) as answer:
            headers = {name: answer.headers[name] for name in _PASSED_HEADERS if name in answer.headers}
            return web.Response(status=answer.status, headers=headers, body=await answer.read())
    except aiohttp.ClientError:
        return error_response(request.path, Failure(503, "the engine did not answer"))


def _begun_like(answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {name: answer.headers[name] for name in _PASSED_HEADERS if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=headers)
    if answer.content_length is not None:
        response.content_length = answer.content_length
    return response


def client_session() -> aiohttp.ClientSession:
    """Connections to engines of this host."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        auto_decompress=False,
        skip_auto_headers=("user-agent", "accept"),
    )
