"""The agent's one port: the gateway's link, its submissions, and what monitoring asks for."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

import talaria
from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.agent.metrics import exposition
from talaria.gpu.agent.relay import Failure, Relay, error_response, pass_through
from talaria.gpu.agent.telemetry import Outbox, Telemetry, as_json
from talaria.gpu.dialects import COUNT_TOKENS
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol.engine import ABI
from talaria.gpu.protocol.submission import read_call
from talaria.gpu.serving import log_no_contents
from talaria.gpu.upstream import Upstream
from talaria.policy.calls import LineKey
from talaria.policy.codec import CODEC

LARGEST_HEADER_BYTES: Final = 65_536
_log = logging.getLogger("talaria.agent")
_decode = msgspec.msgpack.Decoder(wire.FromGateway).decode
_decode_submit = msgspec.json.Decoder(wire.Submit).decode


class AgentServer:
    """``instance`` is None until the engines are up: the port is open before, so that a gateway sees that the agent lives."""

    def __init__(
        self, calls: Upstream, url: Callable[[str], str], key: str | None, outbox: Outbox, telemetry: Telemetry
    ) -> None:  # fmt: skip
        log_no_contents()
        self.instance: AgentInstance | None = None
        self._calls, self._url, self._key = calls, url, key
        self._outbox, self._telemetry = outbox, telemetry
        self._gateway = ""
        self._links: list[str] = []
        """Whose the links are that are up: all of one gateway."""
        self._obeying: dict[asyncio.Task[None], str] = {}
        """By whose word: a link that has ended may still have some to be done."""
        self._resetting = asyncio.Lock()
        self._reset_task: asyncio.Task[None] | None = None
        self._up = asyncio.Event()

    def begin(self, instance: AgentInstance) -> None:
        """The engines are up: calls are taken and gateways are greeted."""
        self.instance = instance
        self._up.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == "/health":
            return web.json_response({"status": "starting" if self.instance is None else "ok" if self.instance.healthy() else "unhealthy"})
        if not self._allowed(request):
            return error_response(request.path, Failure(401, "the agent's key is needed"))
        if request.method == "GET" and request.path == wire.LINK_PATH:
            return await self._link(request)
        if request.method == "GET" and request.path == "/metrics":
            return web.Response(body=exposition(self.instance, self._telemetry), content_type="text/plain")
        if request.method == "POST" and request.path.startswith("/v1/"):
            return await self._post(request)
        return error_response(request.path, Failure(404, "no such path"))

    def _allowed(self, request: web.BaseRequest) -> bool:
        if self._key is None:
            return True
        shown = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(shown, f"Bearer {self._key}".encode())

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _post(self, request: web.BaseRequest) -> web.StreamResponse:
        instance = self.instance
        if instance is None or self._resetting.locked():
            return error_response(request.path, Failure(503, "the instance is starting"))
        body = await _read(request)
        if request.path == COUNT_TOKENS.path:
            return await self._count_tokens(request, body)
        try:
            submit = _decode_submit(request.headers.get(wire.SUBMIT_HEADER, ""))
            call = read_call(submit.call)
        except (msgspec.DecodeError, UnicodeError):
            return error_response(request.path, Failure(400, f"{wire.SUBMIT_HEADER} cannot be read"))
        if call.key.model not in instance.view.models:
            return error_response(request.path, Failure(404, "the call's model is not served here"))
        if call.id in instance.runs:
            return error_response(request.path, Failure(503, "a call of this number is under way"))
        try:
            return await Relay(self._calls, self._url, request, body).run(instance, call, submit.seq, submit.deadline_s)
        except ConnectionError:
            return web.Response()  # to nobody: its client is gone

    async def _count_tokens(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Needs no slot, only an engine that is there."""
        try:
            model = msgspec.json.decode(body)["model"]
            url = self._url(model)
        except (msgspec.DecodeError, TypeError, KeyError):
            return error_response(request.path, Failure(404, "the model is not served here"))
        except EngineFailed:
            return error_response(request.path, Failure(503, "the model is not open here"))
        return await pass_through(self._calls, url, request, body)

    # --- the link --------------------------------------------------------------------------------------------------

    async def _link(self, request: web.BaseRequest) -> web.StreamResponse:
        """A gateway's link, until either side ends it; a new one of the same gateway takes the place of an earlier one.

        Two gateways would number submissions past each other: the second is refused as long as the first one's link is alive.
        """
        gateway = request.headers.get(wire.GATEWAY_HEADER, "")
        other = next((name for name in self._links if name != gateway), None)
        if other is not None:
            _log.error("event=second_gateway refused=%s serves=%s", gateway, other)
            return error_response(request.path, Failure(409, f"gateway {other} is served here"))
        socket = web.WebSocketResponse(max_msg_size=0, compress=False, heartbeat=20.0)
        self._links.append(gateway)
        try:
            while before := [task for task, name in self._obeying.items() if name != gateway]:
                await asyncio.wait(before)
            await socket.prepare(request)
            inbox: asyncio.Queue[wire.FromGateway | None] = asyncio.Queue()
            obeying = asyncio.create_task(self._obey(gateway, socket, inbox))
            self._obeying[obeying] = gateway
            obeying.add_done_callback(self._obeying.pop)
            try:
                await _listen(socket, inbox)
            finally:
                inbox.put_nowait(None)
                if not self._up.is_set():
                    obeying.cancel()
        finally:
            self._links.remove(gateway)  # at once: a successor may be at the door, and waits until this one's last word is done
        await asyncio.wait([obeying])  # a handler is cancelled when its connection is lost: what was said is done even so
        return socket

    async def _obey(self, gateway: str, socket: web.WebSocketResponse, inbox: asyncio.Queue[wire.FromGateway | None]) -> None:
        """Once the engines are up: tell what happens, and do what is said, to the last word (None)."""
        await self._up.wait()
        instance = self.instance
        assert instance is not None
        if gateway != self._gateway:
            self._gateway = gateway
            instance.renumbered()
        queue = self._outbox.open()
        self._greet()
        writer = asyncio.create_task(_write(socket, queue))
        try:
            while (message := await inbox.get()) is not None:
                await self._heard(instance, message)
        except Exception:
            _log.exception("event=bug")
        finally:
            if self._outbox.serves(queue):
                self._outbox.close()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await socket.close()

    def _greet(self) -> None:
        instance = self.instance
        assert instance is not None
        hello = wire.AgentHello(
            instance=instance.id, version=talaria.__version__, abi=ABI, now_s=wire.now_s(), capabilities=as_json(instance.capabilities),
            models=instance.most_prompt_tokens(), leases=instance.leases.live(),
        )  # fmt: skip
        self._outbox.send(hello)
        self._telemetry.publish()

    async def _heard(self, instance: AgentInstance, message: wire.FromGateway) -> None:
        match message:
            case wire.Lease(key, expires_s):
                instance.lease_changed(LineKey(*key), expires_s)
            case wire.Forget(key):
                instance.forget(LineKey(*key))
            case wire.Void(seq):
                instance.seen.add(seq)
            case wire.Open(model) | wire.Close(model):
                instance.group.administer(model, is_open=isinstance(message, wire.Open))
            case wire.Tune(knobs):
                instance.set_knobs(CODEC.decode(msgspec.json.decode(knobs)))
            case wire.Reset():
                self._reset_task = asyncio.create_task(self._reset(instance, message))
                await asyncio.shield(self._reset_task)  # a link that breaks meanwhile must not break a switch

    async def _reset(self, instance: AgentInstance, message: wire.Reset) -> None:
        """Once idle; the gateway sends nothing before it is greeted again."""
        async with self._resetting:
            try:
                while not instance.idle:
                    await asyncio.sleep(0.01)
                self._telemetry.recording = False
                await instance.reset(CODEC.decode(msgspec.json.decode(message.knobs)), session_prefill=message.session_prefill)
                self._telemetry.recording = message.record
            except EngineFailed as error:
                _log.error("event=reset_failed why=%s", error)
            except Exception:  # the gateway waits for the greeting all the same
                _log.exception("event=bug")
        self._greet()


async def _read(request: web.BaseRequest) -> bytes:
    """The whole body; its gateway has limited it."""
    if request.content.is_eof():
        return request.content.read_nowait()
    parts = []
    while part := await request.content.readany():
        parts.append(part)
    return b"".join(parts)


async def _listen(socket: web.WebSocketResponse, inbox: asyncio.Queue[wire.FromGateway | None]) -> None:
    """Whatever comes, to the end of the link. Nothing here takes its time: who does not read does not answer probes either."""
    try:
        async for frame in socket:
            if frame.type is aiohttp.WSMsgType.BINARY:
                inbox.put_nowait(_decode(frame.data))
    except msgspec.DecodeError:
        _log.error("event=link_garbled")


async def _write(socket: web.WebSocketResponse, queue: asyncio.Queue[bytes | None]) -> None:
    while (data := await queue.get()) is not None:
        await socket.send_bytes(data)
    await socket.close()


@contextlib.asynccontextmanager
async def listening(server: AgentServer, host: str, port: int) -> AsyncIterator[int]:
    """The port on which ``server`` answers, until the block ends. Raises OSError where it cannot listen."""
    web_server: Any = web.Server(
        server.handle, handler_cancellation=True, access_log=None, keepalive_timeout=75.0, max_line_size=LARGEST_HEADER_BYTES,
        max_field_size=LARGEST_HEADER_BYTES,
    )  # fmt: skip
    runner = web.ServerRunner(web_server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=2048).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
