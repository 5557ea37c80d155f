"""The stub's HTTP face: SGLang's endpoints, and ``/stub/...`` to make it fail on purpose.

``POST /stub/crash``: dies at once. ``/stub/hang``: its scheduler stops for ever. ``/stub/refuse-next {"calls", "status"}``: the
next calls are answered with an error. ``/stub/timing {"step_s", "prefill_token_s"}``. ``GET /stub/state``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

import msgspec

from talaria.gpu.protocol.engine import CALL_HEADER
from tests.gpu.stub.calls import Call, Showing
from tests.gpu.stub.engine import TAGS, CallError, Engine
from tests.gpu.stub.formats import FORMATS
from tests.gpu.stub.hold import Hold
from tests.gpu.stub.http import Connection, Request
from tests.gpu.stub.text import TOKEN_BYTES, prompt_of

CONTROL = (
    "/pause_generation", "/continue_generation", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
    "/abort_request",
)  # fmt: skip
UNWELL_S = 20.0
"""How long a generation that tests its health is waited for."""

_encode = msgspec.json.Encoder().encode


class Server:
    def __init__(self, engine: Engine, hold: Hold) -> None:
        self.engine, self.hold = engine, hold
        self._numbers = itertools.count()
        self._refuse: list[int] = []
        """Statuses of the next calls."""
        self._showing = Showing()
        self._gets: dict[str, Callable[[Connection], None]] = {
            "/health": lambda to: to.answer(200), "/ready": lambda to: to.answer(503 if engine.paused else 200),
            "/health_generate": self._health_generate, "/v1/models": self._models, "/model_info": self._model_info,
            "/server_info": self._server_info, "/stub/state": self._state,
        }  # fmt: skip

    def handle(self, request: Request, to: Connection) -> Call | None:
        path = request.path
        try:
            if request.method == "POST" and path in FORMATS:
                return self._call(request, to)
            if path in CONTROL:
                self._control(path[1:], _body(request) if request.body else {}, to)
            elif request.method == "GET" and path in self._gets:
                self._gets[path](to)
            elif request.method == "POST" and path == "/v1/messages/count_tokens":
                to.answer(200, _encode({"input_tokens": len(prompt_of("/v1/messages", _body(request))) // TOKEN_BYTES}))
            elif request.method == "POST" and path.startswith("/stub/"):
                self._fault(path[6:], _body(request) if request.body else {}, to)
            else:
                to.answer(404, b"{}")
        except (CallError, ValueError, KeyError) as error:
            to.answer(error.status if isinstance(error, CallError) else 400, _encode({"error": {"message": str(error)}}))
        return None

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, request: Request, to: Connection) -> Call | None:
        kind, engine = FORMATS[request.path], self.engine
        try:
            body = _body(request)
            if self._refuse:
                raise CallError(self._refuse.pop(), "refused on purpose")
            options = engine.options
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
        except CallError as error:
            engine.ended += 1
            to.answer(error.status, kind.error(error.status, error.why))
            return None
        held = request.headers.get(CALL_HEADER)
        call = Call(kind, body, held or f"stub-{next(self._numbers):016x}", prompt, min(limit, most - tokens), engine, to, self._showing)
        call.begin(None if held is None else self.hold)
        return call

    # --- information ----------------------------------------------------------------------------------------------------

    def _health_generate(self, to: Connection) -> None:
        if self.engine.paused or self.engine.hung:
            asyncio.get_running_loop().call_later(UNWELL_S, to.answer, 503)
        else:
            to.answer(200)

    def _models(self, to: Connection) -> None:
        name = self.engine.options.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name, "parent": None}
        to.answer(200, _encode({"object": "list", "data": [card | {"max_model_len": self.engine.options.context_tokens}]}))

    def _model_info(self, to: Connection) -> None:
        options = self.engine.options
        to.answer(200, _encode({
            "model_path": options.path, "served_model_name": options.model, "tokenizer_path": options.path, "is_generation": True,
        }))  # fmt: skip

    def _server_info(self, to: Connection) -> None:
        options = self.engine.options
        if not self.engine.hung:
            to.answer(200, _encode({
                "model_path": options.path, "served_model_name": options.model, "page_size": options.page_tokens,
                "max_total_num_tokens": options.kv_tokens, "max_running_requests": options.max_running,
                "context_length": options.context_tokens, "version": "0.5.23", "internal_states": [{}],
            }))  # fmt: skip

    def _state(self, to: Connection) -> None:
        engine = self.engine
        to.answer(200, _encode({
            "pid": os.getpid(), "running": len(engine.running), "ended": engine.ended, "paused": engine.paused,
            "released": sorted(engine.released), "hung": engine.hung,
        }))  # fmt: skip

    # --- control --------------------------------------------------------------------------------------------------------

    def _control(self, what: str, body: dict[str, Any], to: Connection) -> None:
        engine = self.engine
        if engine.hung:  # what needs the scheduler process waits for ever once that hangs
            return
        match what:
            case "pause_generation":
                engine.pause(body.get("mode", "abort"))
            case "continue_generation":
                engine.resume_generation()
            case "flush_cache":
                return to.answer(200 if engine.flush() else 400)
            case "release_memory_occupation":
                engine.release(body.get("tags") or TAGS)
            case "resume_memory_occupation":
                engine.resume(body.get("tags") or TAGS)
            case "abort_request":
                engine.abort("" if body.get("abort_all") else body.get("rid") or "")
        to.answer(200, b'{"status":"ok"}')

    def _fault(self, fault: str, body: dict[str, Any], to: Connection) -> None:
        match fault:
            case "crash":
                self.engine.die("told to")
            case "hang":
                self.engine.hang()
            case "refuse-next":
                self._refuse = [body.get("status", 500)] * body.get("calls", 1)
            case "timing":
                for name, value in body.items():
                    setattr(self.engine.timing, name, value)
            case _:
                return to.answer(404, f"no fault {fault}".encode(), kind="text/plain")
        to.answer(200, b'{"status":"ok"}')


def _body(request: Request) -> dict[str, Any]:
    """Raises CallError for what is no object."""
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(400, f"Invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise CallError(400, "Input should be an object")
    return body
