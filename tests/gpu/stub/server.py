"""The stub's HTTP face: SGLang's endpoints, and ``/stub/...`` to make it fail on purpose.

``POST /stub/crash``: dies at once. ``/stub/hang``: its scheduler stops for ever. ``/stub/refuse-next {"calls", "status"}``: the
next calls are answered with an error. ``/stub/timing {"step_s", "prefill_token_s"}``. ``GET /stub/state``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from talaria.gpu.protocol.engine import CALL_HEADER
from tests.gpu.stub.engine import TAGS, CallError, Engine, Run
from tests.gpu.stub.formats import FORMATS, Format
from tests.gpu.stub.hold import Hold
from tests.gpu.stub.text import TOKEN_BYTES, prompt_of


class _Answer:
    """The answer to one call. Most streams begin with their first token, so that an error before it has a status of its own."""

    def __init__(self, request: web.Request, kind: type[Format]) -> None:
        self._request, self._kind = request, kind
        self._stream: web.StreamResponse | None = None

    async def give(self, form: Format, tokens: AsyncIterator[object]) -> web.StreamResponse:
        if not form.body.get("stream"):
            async for _ in tokens:
                pass
            return web.Response(body=form.whole(), content_type="application/json")
        opening = form.opening()
        stream = None if opening is None else await self._begin(opening)
        sent = 0
        async for _ in tokens:
            if stream is None:
                stream = await self._begin(b"")
            head = form.head() if not sent else b""
            words, sent = form.run.output[sent:], len(form.run.output)
            await stream.write(head + b"".join(map(form.token, words)))
        assert stream is not None
        await stream.write(form.tail())
        await stream.write_eof()
        return stream

    async def _begin(self, opening: bytes) -> web.StreamResponse:
        self._stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await self._stream.prepare(self._request)
        if opening:
            await self._stream.write(opening)
        return self._stream

    async def fail(self, error: CallError) -> web.StreamResponse:
        if self._stream is None:
            return web.Response(status=error.status, body=self._kind.error(error.status, error.why), content_type="application/json")
        await self._stream.write(self._kind.error_event(error.status, error.why))
        await self._stream.write_eof()
        return self._stream


class Server:
    def __init__(self, engine: Engine, hold: Hold) -> None:
        self.engine, self.hold = engine, hold
        self._numbers = itertools.count()
        self._refuse: list[int] = []
        """Statuses of the next calls."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        for path in FORMATS:
            app.router.add_post(path, self._call)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        for path, get in {
            "/health": self._health, "/ready": self._ready, "/health_generate": self._health_generate, "/v1/models": self._models,
            "/model_info": self._model_info, "/server_info": self._server_info, "/stub/state": self._state,
        }.items():  # fmt: skip
            app.router.add_get(path, get)
        for path in (
            "pause_generation", "continue_generation", "flush_cache", "release_memory_occupation", "resume_memory_occupation",
            "abort_request",
        ):  # fmt: skip
            app.router.add_route("*", f"/{path}", self._control)
        app.router.add_post("/stub/{fault}", self._fault)
        return app

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, request: web.Request) -> web.StreamResponse:
        kind = FORMATS[request.path]
        answer = _Answer(request, kind)
        run: Run | None = None
        try:
            body = await self._body(request)
            run = self._run(request, kind, body)
            held = CALL_HEADER in request.headers
            async with aclosing(self.hold.run(run) if held else self.engine.segment(run, run.limit)) as tokens:
                return await answer.give(kind(body, run), tokens)
        except CallError as error:
            return await answer.fail(error)
        except asyncio.CancelledError:
            if run is None or run.error is None:
                raise
            run.task.uncancel()
            return await answer.fail(run.error)
        finally:
            self.engine.ended += 1

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            raise CallError(400, f"Invalid JSON: {error}") from None
        if not isinstance(body, dict):
            raise CallError(400, "Input should be an object")
        return body

    def _run(self, request: web.Request, kind: type[Format], body: dict[str, Any]) -> Run:
        if self._refuse:
            raise CallError(self._refuse.pop(), "refused on purpose")
        options = self.engine.options
        try:
            prompt = prompt_of(request.path, body)
            limit = next((int(body[name]) for name in kind.limit_names if body.get(name) is not None), kind.default_limit)
        except (KeyError, TypeError, ValueError) as error:
            raise CallError(400, f"invalid request: {error}") from None
        tokens, most = len(prompt) // TOKEN_BYTES, min(options.context_tokens, options.kv_tokens)
        if limit < 1:
            raise CallError(400, f"max_tokens must be at least 1, got {limit}.")
        if tokens >= most:
            raise CallError(400, f"The input ({tokens} tokens) is longer than the model's context length ({most} tokens).")
        name = request.headers.get(CALL_HEADER) or f"stub-{next(self._numbers):016x}"
        task = asyncio.current_task()
        assert task is not None
        return Run(name, prompt, min(limit, most - tokens), bool(body.get("ignore_eos")), task)

    async def _count(self, request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": len(prompt_of("/v1/messages", await self._body(request))) // TOKEN_BYTES})

    # --- information ----------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.paused else 200)

    async def _health_generate(self, _: web.Request) -> web.Response:
        if self.engine.paused or self.engine.hung:
            await asyncio.sleep(20)
            return web.Response(status=503)
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        name = self.engine.options.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name, "parent": None}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self.engine.options.context_tokens}]})

    async def _model_info(self, _: web.Request) -> web.Response:
        options = self.engine.options
        return web.json_response(
            {"model_path": options.path, "served_model_name": options.model, "tokenizer_path": options.path, "is_generation": True}
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        await self.engine.answer()
        options = self.engine.options
        return web.json_response({
            "model_path": options.path, "served_model_name": options.model, "page_size": options.page_tokens,
            "max_total_num_tokens": options.kv_tokens, "max_running_requests": options.max_running,
            "context_length": options.context_tokens, "version": "0.5.23", "internal_states": [{}],
        })  # fmt: skip

    async def _state(self, _: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response({
            "pid": os.getpid(), "running": len(engine.running), "ended": engine.ended, "paused": engine.paused,
            "released": sorted(engine.released), "hung": engine.hung,
        })  # fmt: skip

    # --- control --------------------------------------------------------------------------------------------------------

    async def _control(self, request: web.Request) -> web.Response:
        engine = self.engine
        body = await self._body(request) if request.can_read_body else {}
        await engine.answer()
        match request.path[1:]:
            case "pause_generation":
                engine.pause(body.get("mode", "abort"))
            case "continue_generation":
                engine.resume_generation()
            case "flush_cache":
                return web.Response(status=200 if engine.flush() else 400)
            case "release_memory_occupation":
                engine.release(body.get("tags") or TAGS)
            case "resume_memory_occupation":
                engine.resume(body.get("tags") or TAGS)
            case "abort_request":
                engine.abort("" if body.get("abort_all") else body.get("rid") or "")
        return web.json_response({"status": "ok"})

    async def _fault(self, request: web.Request) -> web.Response:
        body = await self._body(request) if request.can_read_body else {}
        match request.match_info["fault"]:
            case "crash":
                self.engine.die("told to")
            case "hang":
                self.engine.hang()
            case "refuse-next":
                self._refuse = [body.get("status", 500)] * body.get("calls", 1)
            case "timing":
                for name, value in body.items():
                    setattr(self.engine.timing, name, value)
            case fault:
                return web.Response(status=404, text=f"no fault {fault}")
        return web.json_response({"status": "ok"})
