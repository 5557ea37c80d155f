"""What an administrator may do while the gateway runs: drain, close, reload, begin anew, record."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from talaria.errors import InputError
from talaria.gpu.agent.beliefs import knobs_of
from talaria.gpu.config import ClusterConfig, is_loopback
from talaria.gpu.dialects import Problem
from talaria.gpu.gateway.dispatch import Dispatcher
from talaria.gpu.gateway.instances import InstanceState
from talaria.gpu.gateway.recording import Recording
from talaria.gpu.gateway.relay import read_body
from talaria.gpu.gateway.settings import Settings
from talaria.gpu.protocol import agent as wire
from talaria.policy.knobs import KnobError, Knobs, as_dict, with_values
from talaria.policy.router import ROUTERS

RESET_S: Final = 120.0
LONGEST_BODY_BYTES: Final = 2**20

_log = logging.getLogger("talaria.gateway")
_encode = msgspec.json.Encoder().encode

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Admin:
    """``reload`` reads the cluster file again; None where the gateway was not started from one."""

    def __init__(self, dispatcher: Dispatcher, config: ClusterConfig, knobs: Knobs, reload: Callable[[], ClusterConfig] | None) -> None:
        self.config = config
        """The file as of the last reload."""
        self._dispatcher, self._knobs, self._reload = dispatcher, knobs, reload
        self._decides = (config.policy.router, config.policy.session_prefill, knobs_of(config.policy))
        self._reader: Recording | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler."""
        posts = {
            "/admin/drain": self._drain, "/admin/undrain": self._undrain, "/admin/open": self._open, "/admin/close": self._close,
            "/admin/reload": self._reload_settings, "/admin/reset": self._reset,
        }  # fmt: skip
        gets = {"/admin/instances": self._instances, "/admin/records": self._records}
        return [*(("POST", path, handler) for path, handler in posts.items()), *(("GET", path, handler) for path, handler in gets.items())]

    def stop(self) -> None:
        """The gateway stops: whoever reads records has read the last one."""
        if self._reader is not None:
            self._reader.close()

    async def _body(self, request: web.BaseRequest, *allowed: str) -> dict[str, Any]:
        """The document of an administrator's request. Raises Problem for anything else."""
        self._dispatcher.settings.check_admin(request.headers)
        body = await read_body(request, LONGEST_BODY_BYTES)
        try:
            document = msgspec.json.decode(body) if body else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Problem(400, "the body is no valid JSON") from None
        if not isinstance(document, dict) or set(document) - set(allowed):
            raise Problem(400, f"the body must be a JSON object; allowed: {', '.join(allowed)}")
        return document

    def _named(self, document: dict[str, Any]) -> InstanceState:
        name = document.get("instance")
        found = self._dispatcher.instances.get(name) if isinstance(name, str) else None
        if found is None:
            raise Problem(404, f"no such instance; there are: {', '.join(self._dispatcher.instances)}")
        return found

    # --- instances and models --------------------------------------------------------------------------------------

    async def _instances(self, request: web.BaseRequest) -> web.Response:
        self._dispatcher.settings.check_admin(request.headers)
        return self._state()

    def _state(self) -> web.Response:
        dispatcher = self._dispatcher
        instances = {
            name: {
                "connected": item.agent.connected, "healthy": item.healthy, "drained": item.drained, "closed": sorted(item.closed),
                "models": {} if item.snapshot is None else {model: what.residency.value for model, what in item.snapshot.models.items()},
            }
            for name, item in dispatcher.instances.items()
        }  # fmt: skip
        calls = {"accepted": dispatcher.accepted, "open": dispatcher.open_calls, **{name: dispatcher.outcomes[name] for name in _OUTCOMES}}
        return _json({"instances": instances, "calls": calls, "recording": dispatcher.recording is not None})

    async def _drain(self, request: web.BaseRequest) -> web.Response:
        """The instance gets no more calls; those that it has are served."""
        return await self._set_drained(request, True)

    async def _undrain(self, request: web.BaseRequest) -> web.Response:
        return await self._set_drained(request, False)

    async def _set_drained(self, request: web.BaseRequest, drained: bool) -> web.Response:
        instance = self._named(await self._body(request, "instance"))
        instance.drained = drained
        self._dispatcher.changed(instance)
        _log.info("event=%s instance=%s", "drain" if drained else "undrain", instance.agent.name)
        return self._state()

    async def _close(self, request: web.BaseRequest) -> web.Response:
        """No more calls of the model are placed on the instance, or, without one, anywhere; its engine stops when its last has ended."""
        return await self._set_closed(request, True)

    async def _open(self, request: web.BaseRequest) -> web.Response:
        """Its engine starts as soon as no call runs there, and calls are placed again."""
        return await self._set_closed(request, False)

    async def _set_closed(self, request: web.BaseRequest, closed: bool) -> web.Response:
        document = await self._body(request, "instance", "model")
        model = document.get("model")
        if model not in self._dispatcher.settings.models:
            raise Problem(404, f"no such model; there are: {', '.join(self._dispatcher.settings.models)}")
        for instance in [self._named(document)] if "instance" in document else self._dispatcher.instances.values():
            (instance.closed.add if closed else instance.closed.discard)(model)
            instance.agent.send(wire.Close(model) if closed else wire.Open(model))
            self._dispatcher.changed(instance)
        _log.info("event=%s model=%s", "close" if closed else "open", model)
        return self._state()

    # --- configuration ---------------------------------------------------------------------------------------------

    async def _reload_settings(self, request: web.BaseRequest) -> web.Response:
        """All at once, but another router or ``session_prefill`` on an idle gateway only; all of it or, with a reason, nothing."""
        await self._body(request)
        if self._reload is None:
            raise Problem(409, "the gateway was not started from a file")
        try:
            config = self._reload()
            settings, knobs = Settings(config), knobs_of(config.policy)
        except InputError as error:
            raise Problem(400, str(error)) from None
        self._check_applicable(config)
        policy = config.policy
        decides = (policy.router, policy.session_prefill, knobs)
        if decides[:2] != self._decides[:2]:
            await self._dispatcher.reset(policy.router, knobs, policy.session_prefill, None, RESET_S)
        elif decides != self._decides:
            self._dispatcher.tune(knobs)
        self._knobs = knobs
        applied = ["keys", "aliases", "limits", "default_model", *(["policy"] if decides != self._decides else [])]
        settings.models = self._dispatcher.settings.models
        self._dispatcher.settings, self.config, self._decides = settings, config, decides
        self._dispatcher.book.idle_s = settings.limits.session_idle_s
        _log.info("event=reload applied=%s", ",".join(applied))
        return _json({"applied": applied})

    def _check_applicable(self, config: ClusterConfig) -> None:
        """Raises Problem where the file changes what only a restart can, or the new settings do not go with what runs."""
        started = self.config
        fixed = [name for name in ("models", "instances", "engine") if getattr(started, name) != getattr(config, name)]
        fixed += ["policy.profile"] if started.policy.profile != config.policy.profile else []
        fixed += ["gateway.host or gateway.port"] if _address(started) != _address(config) else []
        if fixed:
            raise Problem(409, f"nothing was applied: {', '.join(fixed)} cannot change while the gateway runs; restart it")
        gateway, running = config.gateway, self._dispatcher.settings.models
        named = [*gateway.aliases.values(), *([gateway.default_model] if gateway.default_model else [])]
        unknown = sorted({model for model in named if model not in running})
        if unknown:
            raise Problem(409, f"aliases or default_model name models that need a restart first: {', '.join(unknown)}")
        if not gateway.keys and not is_loopback(self.config.gateway.host):
            raise Problem(409, f"without keys the gateway must not go on listening at {self.config.gateway.host}: restart it")

    # --- measured runs ---------------------------------------------------------------------------------------------

    async def _reset(self, request: web.BaseRequest) -> web.Response:
        """A fresh router, fresh slot schedulers and empty caches on all instances; recorded from the first step if asked."""
        document = await self._body(request, "router", "knobs", "session_prefill", "record")
        router = document.get("router", self.config.policy.router)
        if not isinstance(router, str) or router not in ROUTERS:
            raise Problem(400, f"no such router; there are: {', '.join(ROUTERS)}")
        values, prefill, record = document.get("knobs", {}), document.get("session_prefill", True), document.get("record", False)
        if not isinstance(values, dict) or not isinstance(prefill, bool) or not isinstance(record, bool):
            raise Problem(400, "knobs must be an object, session_prefill and record true or false")
        try:
            knobs = with_values(self._knobs, values)
        except KnobError as error:
            raise Problem(400, str(error)) from None
        if record and (self._reader is None or not self._reader.open):
            raise Problem(409, "nobody reads /admin/records")
        await self._dispatcher.reset(router, knobs, prefill, self._reader if record else None, RESET_S)
        return _json({"router": router, "knobs": as_dict(knobs), "session_prefill": prefill, "record": record})

    async def _records(self, request: web.BaseRequest) -> web.StreamResponse:
        """``protocol.records``, as they come; one reader at a time."""
        self._dispatcher.settings.check_admin(request.headers)
        if self._reader is not None and self._reader.open:
            raise Problem(409, "somebody reads the records already")
        reader = self._reader = Recording()
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            while (lines := await reader.next()) is not None:
                await response.write(lines)
            await response.write_eof()
        finally:
            reader.close()
            if self._dispatcher.recording is reader:
                self._dispatcher.stop_recording()
        return response


_OUTCOMES = ("completed", "failed", "shed")


def _address(config: ClusterConfig) -> tuple[str, int]:
    return config.gateway.host, config.gateway.port


def _json(document: Any) -> web.Response:
    return web.Response(body=_encode(document), content_type="application/json")
