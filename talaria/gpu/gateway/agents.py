"""The gateway's end of one instance: its agent's address, a pool of connections for calls, and the link that is kept up."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import aiohttp
import msgspec

from talaria.gpu.protocol import agent as wire
from talaria.gpu.upstream import Upstream

FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 5.0
CONNECT_S: Final = 5.0
HANDSHAKE_S: Final = 10.0
"""How long a link may take to begin: a host that has gone down never says no."""
PING_S: Final = 20.0
"""A link that has been silent for this long is probed: the same host would leave it half open."""
IDLE_CONNECTION_S: Final = 30.0
"""Shorter than a server keeps an idle connection: a call should not meet one that is just being closed."""

_log = logging.getLogger("talaria.gateway")
_decode = msgspec.msgpack.Decoder(wire.FromAgent).decode
_encode = msgspec.msgpack.Encoder().encode


class Listener(Protocol):
    """Who is told what agents say."""

    def link_up(self, agent: Agent) -> None: ...

    def link_down(self, agent: Agent) -> None: ...

    def heard(self, agent: Agent, message: wire.FromAgent) -> None: ...


class Agent:
    """``url`` is None until the agent's address is known: a child says it when it listens."""

    def __init__(self, name: str, gateway: str, listener: Listener, url: str | None = None, key: str | None = None) -> None:
        self.name = name
        self.url = url
        self.key = key
        self.connected = False
        self._gateway, self._listener = gateway, listener
        self.calls = Upstream(IDLE_CONNECTION_S, CONNECT_S)
        self._http: aiohttp.ClientSession | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._has_url = asyncio.Event()
        if url is not None:
            self._has_url.set()

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S))
        return self._http

    def headers(self) -> dict[str, str]:
        """What every request to the agent shows."""
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    def moved(self, url: str | None) -> None:
        """A child has been started anew, or is down."""
        self.url = url
        if url is None:
            self._has_url.clear()
        else:
            self._has_url.set()

    def send(self, message: wire.FromGateway) -> None:
        """Tell the agent, if it is there: what it missed it learns from nobody, and none of it outlives a link."""
        if self.connected:
            self._outbox.put_nowait(_encode(message))

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        wait_s = FIRST_RETRY_S
        while True:
            await self._has_url.wait()
            try:
                if await self._one_link():
                    wait_s = FIRST_RETRY_S
            except aiohttp.WSServerHandshakeError as error:
                why = "its agent serves another gateway" if error.status == 409 else "its agent does not let us in"
                _log.error("event=link_refused instance=%s status=%d why=%s", self.name, error.status, why)
            except (aiohttp.ClientError, OSError) as error:
                _log.info("event=link_failed instance=%s why=%s", self.name, type(error).__name__)
            except Exception:
                _log.exception("event=bug instance=%s", self.name)
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_RETRY_S, 2.0 * wait_s)

    async def close(self) -> None:
        self.calls.close()
        if self._http is not None:
            await self._http.close()

    async def _one_link(self) -> bool:
        """Returns whether the agent said what could be understood to the end."""
        understood = False
        headers = {**self.headers(), wire.GATEWAY_HEADER: self._gateway}
        url = f"{self.url}{wire.LINK_PATH}"
        async with asyncio.timeout(HANDSHAKE_S):
            opened = await self.http.ws_connect(url, headers=headers, max_msg_size=0, compress=0, heartbeat=PING_S)
        async with opened as link:
            self._outbox = asyncio.Queue()
            self.connected = True
            self._listener.link_up(self)
            writer = asyncio.create_task(self._write(link))
            try:
                async for frame in link:
                    if frame.type is not aiohttp.WSMsgType.BINARY:
                        continue
                    self._listener.heard(self, _decode(frame.data))
                    understood = True
            except (msgspec.DecodeError, ValueError) as error:
                understood = False
                _log.error("event=link_garbled instance=%s why=%s", self.name, error)
            finally:
                self.connected = False
                writer.cancel()
                self._listener.link_down(self)
                await asyncio.gather(writer, return_exceptions=True)
        return understood

    async def _write(self, link: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await link.send_bytes(await self._outbox.get())
