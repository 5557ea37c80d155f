"""The gateway as an HTTP server: paths, who may use them, and what everything that is no call answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from talaria.gpu.dialects import CALLS, COUNT_TOKENS, OTHER, Endpoint, Problem
from talaria.gpu.gateway.admin import Admin
from talaria.gpu.gateway.dispatch import Dispatcher
from talaria.gpu.gateway.explaining import Placement
from talaria.gpu.gateway.openapi import document as openapi_document
from talaria.gpu.gateway.relay import Relay
from talaria.gpu.gateway.sessions import name_of
from talaria.gpu.serving import log_no_contents

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger("talaria.gateway")
_encode = msgspec.json.Encoder(enc_hook=str).encode


def json_response(document: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=_encode(document), content_type="application/json")


class GatewayServer:
    """``handle`` is the handler of an ``aiohttp.web.Server``: no routing tables and middlewares stand before a call."""

    def __init__(self, dispatcher: Dispatcher, admin: Admin) -> None:
        log_no_contents()
        self._dispatcher = dispatcher
        self.stopping = False
        relay = Relay(dispatcher)
        self._exact: dict[str, tuple[Endpoint, Mapping[str, Handler]]] = {
            endpoint.path: (endpoint, {"POST": partial(relay.call, endpoint=endpoint)}) for endpoint in CALLS
        }
        self._exact[COUNT_TOKENS.path] = COUNT_TOKENS, {"POST": relay.count_tokens}
        gets: dict[str, Handler] = {
            "/health": self._health, "/ready": self._ready, "/metrics": self._metrics, "/openapi.json": self._openapi,
            "/v1/models": self._models, "/debug/sessions": self._sessions, "/debug/placements": self._placements,
        }  # fmt: skip
        for path, handler in gets.items():
            self._exact[path] = OTHER, {"GET": handler}
        for method, path, handler in admin.routes():
            self._exact[path] = OTHER, {method: handler}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        endpoint, methods = self._exact.get(path, (OTHER, None))
        try:
            if methods is None and path.startswith("/v1/models/"):
                methods = {"GET": self._model}
            if methods is None:
                raise Problem(404, f"there is no {path[:200]!r} here")
            handler = methods.get("GET" if request.method == "HEAD" else request.method)
            if handler is None:
                problem = Problem(405, f"{path} takes {', '.join(methods)}")
                return self._refused(endpoint, problem, {"allow": ", ".join(methods)})
            return await handler(request)
        except Problem as problem:
            return self._refused(endpoint, problem, {})
        except ConnectionError:
            return web.Response()  # to nobody: its client is gone
        except Exception:
            _log.exception("event=bug path=%s", path)
            return self._refused(endpoint, Problem(500, "the gateway failed; its log says why"), {})

    def _refused(self, endpoint: Endpoint, problem: Problem, headers: Mapping[str, str]) -> web.Response:
        self._dispatcher.metrics.refused(str(problem.status)).inc()
        body = endpoint.error_body(problem)
        return web.Response(status=problem.status, body=body, content_type="application/json", headers={**problem.headers, **headers})

    # --- state -----------------------------------------------------------------------------------------------------

    async def _health(self, request: web.BaseRequest) -> web.Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        """Every model has a healthy instance."""
        instances = self._dispatcher.instances
        models = self._dispatcher.settings.models
        missing = [model for model in models if not any(item.healthy and item.serves(model) for item in instances.values())]
        ready = not missing and not self.stopping and not self._dispatcher.door.resetting
        document = {"ready": ready, "models_missing": missing, "instances": {name: item.healthy for name, item in instances.items()}}
        return json_response(document, 200 if ready else 503)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=generate_latest(self._dispatcher.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _openapi(self, request: web.BaseRequest) -> web.Response:
        return json_response(openapi_document())

    # --- models ----------------------------------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.Response:
        """In OpenAI's shape and in Anthropic's at once: their fields do not collide."""
        self._dispatcher.settings.tenant(request.headers)
        settings = self._dispatcher.settings
        data = [self._model_card(name, name) for name in settings.models]
        data += [self._model_card(alias, model) for alias, model in settings.aliases.items()]
        return json_response({"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})

    async def _model(self, request: web.BaseRequest) -> web.Response:
        self._dispatcher.settings.tenant(request.headers)
        name = request.path.removeprefix("/v1/models/")
        return json_response(self._model_card(name, self._dispatcher.settings.served_name(name)))

    def _model_card(self, name: str, model: str) -> dict[str, Any]:
        hellos = [item.hello for item in self._dispatcher.instances.values() if item.hello is not None]
        lengths = [hello.models[model] for hello in hellos if model in hello.models]
        return {
            "id": name, "object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "talaria",
            "display_name": name, "root": model, "max_model_len": min(lengths) if lengths else None,
        }  # fmt: skip

    # --- debugging -------------------------------------------------------------------------------------------------

    def _check_insight(self, request: web.BaseRequest) -> None:
        """What other tenants do is the administrator's business; on a gateway without keys everybody is that."""
        if self._dispatcher.settings.has_keys or self._dispatcher.settings.has_admin:
            self._dispatcher.settings.check_admin(request.headers)

    async def _sessions(self, request: web.BaseRequest) -> web.Response:
        """The most recently used sessions first, at most ``limit`` (default 100) of them."""
        self._check_insight(request)
        entries = list(self._dispatcher.book.sessions())
        newest = entries[-_limit(request) :][::-1]
        return json_response({"count": len(entries), "sessions": [_session(name, entry, self._dispatcher) for name, entry in newest]})

    async def _placements(self, request: web.BaseRequest) -> web.Response:
        """The latest placements first, at most ``limit`` (default 100), of one ``session`` or one ``call`` if that is asked for.

        A session is named by the id that its client sends, or by the beginning of its hash, as logs say it."""
        self._check_insight(request)
        session, call = request.query.get("session"), request.query.get("call")
        kept = [
            item
            for item in reversed(self._dispatcher.explainer.kept)
            if (session is None or item.session.startswith(session) or item.session == name_of(item.tenant, session))
            and (call is None or str(item.call) == call)
        ]
        return json_response({"placements": [_placement(item) for item in kept[: _limit(request)]]})


def _limit(request: web.BaseRequest) -> int:
    text = request.query.get("limit", "100")
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 0 < int(text) <= 10_000:
        raise Problem(400, "limit must be a number from 1 to 10000")
    return int(text)


def _placement(item: Placement) -> dict[str, Any]:
    why = item.explanation
    return {**item._asdict(), "explanation": why and why.as_dict(), "text": why.text() if why else f"call {item.call}: {item.answer}"}


def _session(name: tuple[str, str], entry: Any, dispatcher: Dispatcher) -> dict[str, Any]:
    return {
        "tenant": name[0], "session": name[1], "signal": entry.signal, "used_s": entry.used_s,
        "lines": [
            {
                "line": line.key.line, "model": line.key.model, "turn": line.turn, "items": line.items, "open_calls": line.open_calls,
                "prompt_tokens": line.marks[-1].prompt_tokens if line.marks else line.inherited_tokens, "served_by": line.served_by,
                "lease": dispatcher.leases.live.get(line.key),
            }
            for line in entry.lines.values()
        ],
    }  # fmt: skip
