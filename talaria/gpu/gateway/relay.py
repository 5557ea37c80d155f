"""One call from its request to its last byte: accept, place, post, and pass on what comes, as it comes.

A call is placed again only while its client has been sent nothing of an answer: an instance that is gone or draining costs time then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

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
from talaria.gpu.upstream import Reply, UpstreamFailed
from talaria.policy.snapshot import Residency

_log = logging.getLogger("talaria.gateway")

MOST_ATTEMPTS: Final = 4
FIRST_BACKOFF_S: Final = 0.05
LAST_WORD_S: Final = 1.0
"""How long the end of an answer waits for its agent's books."""
LONGEST_BODY_S: Final = 120.0
"""How long a request's body may take to arrive: meanwhile it counts as in flight."""
_PASSED_HEADERS: Final = ("content-type", "retry-after")


class Relay:
    """Requests that reach a model."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def call(self, request: web.BaseRequest, endpoint: Endpoint) -> web.StreamResponse:
        """A call. Raises Problem where it is refused before it has begun."""
        enqueued_s, settings = now_s(), self._dispatcher.settings
        tenant = settings.tenant(request.headers)
        with self._dispatcher.door.room(tenant, settings.limits.in_flight):
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
        with self._dispatcher.door.room(tenant, settings.limits.in_flight):
            asked = requests.read(COUNT_TOKENS, await read_body(request, settings.limits.body_bytes), settings)
            try:
                async with asyncio.timeout(settings.limits.call_deadline_s):
                    return await self._counted(asked)
            except TimeoutError:
                raise Problem(504, "no answer within the deadline") from None

    async def _counted(self, asked: requests.ClientRequest) -> web.StreamResponse:
        for instance in self._holders(asked.model):
            try:
                got, body = await self._post(asked, instance, {})
            except UpstreamFailed:
                continue
            if got.status != 503:
                return web.Response(status=got.status, headers=_passed(got), body=body)
        raise Problem(503, f"no instance that serves {asked.model!r} is there", kind="overloaded", retry_after_s=5.0)

    def _holders(self, model: str) -> list[InstanceState]:
        """Healthy instances that serve the model, those first that have it open."""
        able = [item for item in self._dispatcher.instances.values() if item.healthy and item.serves(model)]
        return sorted(able, key=lambda item: item.snapshot is not None and item.snapshot.models[model].residency is Residency.ABSENT)

    async def _answer(self, asked: requests.ClientRequest, live: LiveCall, answer: Answer) -> tuple[web.StreamResponse, str, str]:
        """Returns the answer as it was sent, the outcome and why it failed."""
        if asked.stream:
            answer.expected()
        got, body = await self._reach(asked, live)
        if got.is_stream:
            return await self._pass_on(got, body, live, answer)
        await self._dispatcher.last_word(live, LAST_WORD_S)
        outcome, why = ("completed", "") if got.status < 400 else ("failed", f"status {got.status}")
        if answer.began or (got.status >= 400 and got.content_type != "application/json"):  # an engine's own fault says little
            response = await answer.fail(Problem(got.status, message_of(body)))
        else:
            response = await answer.whole(got.status, _passed(got), body)
        return response, outcome, why

    async def _pass_on(self, got: Reply, first: bytes, live: LiveCall, answer: Answer) -> tuple[web.StreamResponse, str, str]:
        try:
            await answer.write(first)
            await got.pass_to(answer.give, answer.drained)
        except UpstreamFailed:
            problem = Problem(502, "the engine's answer broke off")
            return await answer.fail(problem), "failed", problem.message
        finally:
            got.close()
        await self._dispatcher.last_word(live, LAST_WORD_S)
        return await answer.end(), "completed", ""

    async def _reach(self, asked: requests.ClientRequest, live: LiveCall) -> tuple[Reply, bytes]:
        """An instance's answer, whole or a stream with its first bytes, after as many placements as it takes. Raises Problem."""
        dispatcher, wait_s, last = self._dispatcher, FIRST_BACKOFF_S, ""
        for attempt in range(MOST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s *= 2.0
            instance = await dispatcher.place(live)
            try:
                got = await self._submit(asked, live, instance)
            except UpstreamFailed as gone:
                _log.warning("event=not_taken call=%d instance=%s why=%s", live.id, instance.agent.name, gone)
                dispatcher.lost(live, arrived=gone.arrived)
                if not gone.arrived:
                    dispatcher.distrust(instance)
                last = f"instance {instance.agent.name} did not answer"
                continue
            if got[0].status != 503 or attempt == MOST_ATTEMPTS - 1:
                return got
            dispatcher.lost(live, arrived=False)
            dispatcher.distrust(instance)
        raise Problem(502, last, kind="no_instance", retry_after_s=2.0)

    async def _submit(self, asked: requests.ClientRequest, live: LiveCall, instance: InstanceState) -> tuple[Reply, bytes]:
        """Raises UpstreamFailed where no byte of an answer came, or the instance is silent and another can answer."""
        headers = {SUBMIT_HEADER: self._dispatcher.submission(live, instance)}
        try:
            async with asyncio.timeout(None) as live.unanswered:
                return await self._post(asked, instance, headers)
        except TimeoutError:
            raise UpstreamFailed("silent", arrived=True) from None
        finally:
            live.unanswered = None

    async def _post(self, asked: requests.ClientRequest, instance: InstanceState, headers: dict[str, str]) -> tuple[Reply, bytes]:
        """Raises UpstreamFailed where no byte of an answer came."""
        agent, reply = instance.agent, Reply()
        if agent.url is None:
            raise UpstreamFailed("no address", arrived=False)
        sent = {**agent.headers(), "content-type": "application/json", **headers}
        try:
            await agent.calls.post(reply, agent.url, asked.endpoint.path, sent, asked.body)
            body = await (reply.some() if reply.is_stream else reply.read())
            if reply.is_stream and not body:
                raise UpstreamFailed("an empty stream", arrived=True)
        except BaseException:
            reply.close()
            raise
        return reply, body


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
        if request.content.is_eof() and request.content.total_bytes <= most:  # as a rule it came with the head
            return request.content.read_nowait()
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


def _passed(reply: Reply) -> dict[str, str]:
    return {name: reply.headers[name] for name in _PASSED_HEADERS if name in reply.headers}
