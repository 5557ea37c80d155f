"""Whose link an agent takes: one gateway's at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest

from talaria.gpu.agent.server import AgentServer, listening
from talaria.gpu.agent.telemetry import Outbox, Telemetry
from talaria.gpu.gateway.agents import Agent
from talaria.gpu.protocol import agent as wire

PATIENCE_S = 120.0


def starting() -> AgentServer:
    """An agent whose engines are not up yet: links are taken, and wait."""
    outbox, unused = Outbox(), Any
    return AgentServer(unused, lambda model: "", None, outbox, Telemetry(outbox, wire.now_s))


def test_a_second_gateway_is_refused_while_the_first_is_there_and_takes_over_when_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with asyncio.timeout(PATIENCE_S), listening(starting(), "127.0.0.1", 0) as port, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}{wire.LINK_PATH}"

            async def link(name: str) -> aiohttp.ClientWebSocketResponse:
                return await http.ws_connect(url, headers={wire.GATEWAY_HEADER: name})

            async def once_free(name: str) -> aiohttp.ClientWebSocketResponse:
                """As a gateway would: the agent may see the end of a link a moment later."""
                while True:
                    try:
                        return await link(name)
                    except aiohttp.WSServerHandshakeError:
                        await asyncio.sleep(0.01)

            first = await link("one")
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await link("two")
            assert refused.value.status == 409
            assert "event=second_gateway refused=two serves=one" in caplog.text
            again = await link("one")  # its own link, before the agent has seen the earlier one break
            await first.close()
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await link("two")
            await again.close()
            await (await once_free("two")).close()

    asyncio.run(test())


def test_a_successor_is_let_in_as_soon_as_the_earlier_link_has_ended_and_heard_when_its_last_word_is_done() -> None:
    """It is no second gateway, however long what the first one has said takes."""

    class Slow(AgentServer):
        async def _obey(self, gateway: str, *rest: Any) -> None:
            said.append(f"{gateway} begins")
            if gateway == "one":
                await done.wait()
            said.append(f"{gateway} is done")

    said: list[str] = []

    async def test() -> None:
        outbox, unused = Outbox(), Any
        server = Slow(unused, lambda model: "", None, outbox, Telemetry(outbox, wire.now_s))
        server.begin(unused)
        async with asyncio.timeout(PATIENCE_S), listening(server, "127.0.0.1", 0) as port, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}{wire.LINK_PATH}"
            first = await http.ws_connect(url, headers={wire.GATEWAY_HEADER: "one"})
            await first.close()
            second = asyncio.create_task(http.ws_connect(url, headers={wire.GATEWAY_HEADER: "two"}))
            assert not (await asyncio.wait([second], timeout=0.05))[0]
            done.set()
            await (await second).close()
            assert said == ["one begins", "one is done", "two begins", "two is done"]

    done = asyncio.Event()
    asyncio.run(test())


def test_a_gateway_that_is_refused_says_so_and_keeps_asking(caplog: pytest.LogCaptureFixture) -> None:
    class Nobody:
        def link_up(self, agent: Agent) -> None:
            up.set()

        def link_down(self, agent: Agent) -> None: ...

        def heard(self, agent: Agent, message: wire.FromAgent) -> None: ...

    caplog.set_level(logging.ERROR)
    up = asyncio.Event()

    async def test() -> None:
        async with asyncio.timeout(PATIENCE_S), listening(starting(), "127.0.0.1", 0) as port, aiohttp.ClientSession() as http:
            first = await http.ws_connect(f"http://127.0.0.1:{port}{wire.LINK_PATH}", headers={wire.GATEWAY_HEADER: "one"})
            agent = Agent("a", "two", Nobody(), f"http://127.0.0.1:{port}")
            running = asyncio.create_task(agent.run())
            while "event=link_refused instance=a status=409 why=its agent serves another gateway" not in caplog.text:
                await asyncio.sleep(0.01)
            assert not up.is_set()
            await first.close()
            await up.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await agent.close()

    asyncio.run(test())
