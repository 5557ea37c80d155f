"""One call's way through an agent, where its ends come close together."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp.test_utils import make_mocked_request

from talaria.gpu.agent.relay import Relay


class Instance:
    """An engine comes up and the call's deadline comes, in one turn of the event loop."""

    def submit(self, call: Any, client: Relay, seq: int) -> str:
        client.post("m0")
        client.fail(504, "the call's deadline has come")
        return "run"

    def end_early(self, run: str, status: int, why: str) -> None: ...


class Engines:
    async def post(self, *asked: Any) -> None:
        raise AssertionError("nobody waits for it any more")


def test_a_call_that_ended_before_its_engine_was_asked_is_not_brought_to_it() -> None:
    async def test() -> None:
        engines: Any = Engines()
        instance: Any = Instance()
        call: Any = None
        relay = Relay(engines, lambda model: "", make_mocked_request("POST", "/v1/chat/completions"), b"{}")
        assert (await relay.run(instance, call, 1, None)).status == 504

    asyncio.run(asyncio.wait_for(test(), 10.0))
