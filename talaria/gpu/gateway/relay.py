"""One call from its request to its last byte: accept, place, post, and pass on what comes, as it comes.

A call is placed again only while its client has been sent nothing of an answer: an instance that is gone or draining costs time then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web

from talaria.gpu.dialects import COUNT_TOKENS, Endpoint, Problem, message_of
from talaria.gpu.gateway import requests
from talaria.gpu.gateway.answers import Answer
from talaria.gpu.gateway.calls import LiveCall
from talaria.gpu.gateway.conversation import conversation
from talaria.gpu.gateway.dispatch import Dispatcher
from talaria.gpu.gateway.instances import InstanceState
from talaria.gpu.gateway.sessions import session_of
from talaria.gpu.protocol.agent import SUBMIT_HEADER, now_s
from talaria.policy.snapshot import Residency

_log = logging.getLogger("talaria.gateway")

MOST_ATTEMPTS: Final = 4
FIRST_BACKOFF_S: Final = 0.05
LAST_WORD_S: Final = 1.0
"""How long the end of an answer waits for its agent's books."""
LONGEST_BODY_S: Final = 120.0
"""How long a request's body may take to arrive: meanwhile it counts as in flight."""
_PASSED_HEADERS: Final = ("content-type", "retry-after")


class Upstream(NamedTuple):
    """An agent's answer: whole, or a stream with its first bytes."""

    response: aiohttp.ClientResponse
    is_stream: bool
    body: bytes


class _Gone(Exception):
    """The instance did not answer; ``arrived``: it may have had the call."""

    def __init__(self, why: str, *, arrived: bool) -> None:
        super().__init__(why)
        self.arrived = arrived


class Relay:
    """Requests that reach a model."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def call(self, request: web.BaseRequest, endpoint: Endpoint) -> web.StreamResponse:
        """A call. Raises Problem where it is refused before it has begun."""
        enqueued_s, settings = now_s(), self._dispatcher.settings
        tenant = settings.tenant(request.headers)
        with self._dispatcher.room(tenant):
            asked = requests.read(endpoint, await read_body(request, settings.limits.body_bytes), settings)
            said = conversation(endpoint, asked.document)
            session = session_of(tenant.name, request.headers, asked.document, said.root)
            live = self._dispatcher.open(tenant, session, asked.model, said, enqueued_s, asked.output_tokens)
            return await self._serve(asked, live, Answer(request, endpoint, live.id, settings.limits.keep_alive_s))

    async def _serve(self, asked: requests.ClientRequest, live: LiveCall, answer: Answer) -> web.StreamResponse:
        """The call's answer, whatever becomes of it; its books are closed once."""
        deadline_s = self._dispatcher.settings.limits.call_deadline_s
        outcome, why = "failed", "the gateway failed"
        try:
            async with asyncio.timeout(deadline_s):
                response, outcome, why = await self._answer(asked, live, answer)
            return response
        except TimeoutError:
            why = "the call's deadline"
            return await answer.fail(Problem(504, f"the call took longer than its deadline of {deadline_s:g} s"))
        except Problem as problem:
            outcome, why = "shed" if problem.kind == "overloaded" and live.routed is None else "failed", problem.message
            return await answer.fail(problem)
        except (asyncio.CancelledError, ConnectionError):
            outcome, why = "left", "the client went away"
            raise
        except Exception:
            _log.exception("event=bug call=%d", live.id)
            return await answer.fail(Problem(500, "the gateway failed; its log says why"))
        finally:
            answer.close()
            self._dispatcher.close(live, outcome, why)

    async def count_tokens(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answered by any engine of the model; no session, no slot."""
        settings = self._dispatcher.settings
        tenant = settings.tenant(request.headers)
        with self._dispatcher.room(tenant):
            asked = requests.read(COUNT_TOKENS, await read_body(request, settings.limits.body_bytes), settings)
            try:
                async with asyncio.timeout(settings.limits.call_deadline_s):
                    return await self._counted(asked)
            except TimeoutError:
                raise Problem(504, "no answer within the deadline") from None

    async def _counted(self, asked: requests.ClientRequest) -> web.StreamResponse:
        for instance in self._holders(asked.model):
            try:
                got = await self._post(asked, instance, {})
            except _Gone:
                continue
            if got.response.status != 503:
                return web.Response(status=got.response.status, headers=_passed(got.response), body=got.body)
        raise Problem(503, f"no instance that serves {asked.model!r} is there", kind="overloaded", retry_after_s=5.0)

    def _holders(self, model: str) -> list[InstanceState]:
        """Healthy instances that serve the model, those first that have it open."""
        able = [item for item in self._dispatcher.instances.values() if item.healthy and item.serves(model)]
        return sorted(able, key=lambda item: item.snapshot is not None and item.snapshot.models[model].residency is Residency.ABSENT)

    async def _answer(self, asked: requests.ClientRequest, live: LiveCall, answer: Answer) -> tuple[web.StreamResponse, str, str]:
        """Returns the answer as it was sent, the outcome and why it failed."""
        reaching = self._reach(asked, live)
        got = await (_with_keep_alives(reaching, answer, self._dispatcher.settings.limits.keep_alive_s) if asked.stream else reaching)
        if got.is_stream:
            return await self._pass_on(got, live, answer)
        status = got.response.status
        await self._dispatcher.last_word(live, LAST_WORD_S)
        outcome, why = ("completed", "") if status < 400 else ("failed", f"status {status}")
        if answer.began or (status >= 400 and got.response.content_type != "application/json"):  # an engine's own fault says little
            response = await answer.fail(Problem(status, message_of(got.body)))
        else:
            response = await answer.whole(status, _passed(got.response), got.body)
        return response, outcome, why

    async def _pass_on(self, got: Upstream, live: LiveCall, answer: Answer) -> tuple[web.StreamResponse, str, str]:
        read = got.response.content.readany
        try:
            await answer.write(got.body)
            while chunk := await read():
                await answer.write(chunk)
        except aiohttp.ClientError:
            problem = Problem(502, "the engine's answer broke off")
            return await answer.fail(problem), "failed", problem.message
        finally:
            if not got.response.content.at_eof():  # else its connection is free already
                got.response.close()
        await self._dispatcher.last_word(live, LAST_WORD_S)
        return await answer.end(), "completed", ""

    async def _reach(self, asked: requests.ClientRequest, live: LiveCall) -> Upstream:
        """An instance's answer, after as many placements as it takes. Raises Problem if there is none."""
        dispatcher, wait_s, last = self._dispatcher, FIRST_BACKOFF_S, ""
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s *= 2.0
            instance = await dispatcher.place(live)
            try:
                got = await self._submit(asked, live, instance)
            except _Gone as gone:
                _log.warning("event=not_taken call=%d instance=%s why=%s", live.id, instance.agent.name, gone)
                dispatcher.lost(live, arrived=gone.arrived)
                if not gone.arrived:
                    dispatcher.distrust(instance)
                last = f"instance {instance.agent.name} did not answer"
                continue
            if got.response.status != 503 or attempt == MOST_ATTEMPTS - 1:
                return got
            dispatcher.lost(live, arrived=False)
            dispatcher.distrust(instance)
        raise Problem(502, last, kind="no_instance", retry_after_s=2.0)

    async def _submit(self, asked: requests.ClientRequest, live: LiveCall, instance: InstanceState) -> Upstream:
        """Raises _Gone where no byte of an answer came, or where nothing is heard of the instance any more and another can answer."""
        headers = {SUBMIT_HEADER: self._dispatcher.submission(live, instance)}
        try:
            async with asyncio.timeout(None) as live.unanswered:
                return await self._post(asked, instance, headers)
        except TimeoutError:
            raise _Gone("silent", arrived=True) from None
        finally:
            live.unanswered = None

    async def _post(self, asked: requests.ClientRequest, instance: InstanceState, headers: dict[str, str]) -> Upstream:
        """Raises _Gone where no byte of an answer came."""
        agent = instance.agent
        if agent.url is None:
            raise _Gone("no address", arrived=False)
        sent = {**agent.headers(), "content-type": "application/json", **headers}
        try:
            response = await agent.http.post(agent.url + asked.endpoint.path, data=asked.body, headers=sent)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _Gone(str(error), arrived=False) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Gone(str(error), arrived=True) from None
        is_stream = response.status == 200 and response.content_type == "text/event-stream"
        try:
            body = await (response.content.readany() if is_stream else response.read())
            if is_stream and not body:
                raise _Gone("an empty stream", arrived=True)
        except (aiohttp.ClientError, OSError) as error:
            raise _Gone(str(error), arrived=True) from None
        except BaseException:
            response.close()
            raise
        return Upstream(response, is_stream, body)


async def _with_keep_alives(reaching: Coroutine[Any, Any, Upstream], answer: Answer, keep_alive_s: float) -> Upstream:
    """What ``reaching`` finds; meanwhile the client hears that it is not forgotten."""
    task = asyncio.ensure_future(reaching)
    try:
        while not (await asyncio.wait((task,), timeout=keep_alive_s))[0]:
            await answer.keep_alive()
    except BaseException:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is None:  # the answer began as its client left
            task.result().response.close()
        raise
    return task.result()


async def read_body(request: web.BaseRequest, most: int) -> bytes:
    """Raises Problem for a body beyond ``most`` bytes, a compressed one, or one that does not arrive as announced."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Problem(415, "compressed bodies are not taken")
    if request.content_length is not None and request.content_length > most:
        raise Problem(413, f"the body has {request.content_length} bytes; at most {most} are taken")
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, size = [], 0
    try:
        async with asyncio.timeout(LONGEST_BODY_S):
            while part := await request.content.readany():
                size += len(part)
                if size > most:
                    raise Problem(413, f"the body has more than {most} bytes")
                parts.append(part)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {LONGEST_BODY_S:g} s") from None
    except (web.RequestPayloadError, aiohttp.ClientError, aiohttp.http.HttpProcessingError):
        raise Problem(400, "the body cannot be read") from None
    return b"".join(parts)


def _passed(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: response.headers[name] for name in _PASSED_HEADERS if name in response.headers}
