"""Clients that mean ill, or are merely broken: nothing of them is kept, counted twice or logged."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import pytest

from talaria.gpu.gateway import relay
from tests.gpu.gateway.fake import ADMIN, FakeAgent, Rig, Submitted, rig, run, say

CHAT = "/v1/chat/completions"


def port_of(made: Rig) -> int:
    return int(made.url.rsplit(":", 1)[1])


def chat_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(data), data)


def test_a_body_that_never_arrives_is_given_up_and_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LONGEST_BODY_S", 1.0)

    async def test() -> None:
        async with rig(limits={"in_flight": 1}) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(made))
            writer.write(chat_bytes(say("hi"))[:-5])
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
            assert (await made.post(CHAT, say("hi"))).status == 200
            writer.close()
            assert (await made.settled())["accepted"] == 1

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_has_its_call_ended_by_the_deadline(stream: bool) -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.words = " ".join(["x" * 100_000] * 200)
        async with rig(agent, limits={"call_deadline_s": 1.0, "keep_alive_s": 0.1}) as made:
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port_of(made)))
            deaf.sendall(chat_bytes(say("hi", stream=stream)))
            while not (await made.calls())["accepted"]:
                await asyncio.sleep(0.005)
            await made.settled()
            deaf.close()

    run(test())


def test_a_client_that_leaves_is_not_taken_for_an_engine_that_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    """A write may notice its departure before the server does."""

    async def test() -> None:
        agent, parts = FakeAgent("a"), 0

        async def between(submitted: Submitted) -> None:
            nonlocal parts
            parts += 1
            await asyncio.sleep(0)

        agent.between = between
        agent.words = "word " * 3000
        async with rig(agent) as made:
            for _ in range(10):
                answer = await made.http.post(made.url + CHAT, json=say("hi", stream=True))
                await answer.content.readany()
                answer.close()
            await made.settled()
            assert (await made.post(CHAT, say("hi"))).status == 200
            assert parts

    with caplog.at_level(logging.INFO):
        run(test())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or "broke off" in record.getMessage()]


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer se\rcret-7\r\n\r\n",
        b"secret-7 of a prompt that was announced as shorter than it is\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nX-Api-Key: secret-7" + 40_000 * b"7" + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_not_logged(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with rig() as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(made))
            writer.write(sent)
            assert b" 400 " in await reader.readuntil(b"\r\n")
            writer.close()
            assert (await made.post(CHAT, say("hi"))).status == 200

    with caplog.at_level(logging.INFO):
        run(test())
    assert "secret" not in caplog.text and "cret-7" not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/admin/reset", {"router": []}),
        ("POST", "/admin/reset", {"router": {}}),
        ("POST", "/admin/close", {"model": {}}),
        ("POST", "/admin/drain", {"instance": []}),
        ("GET", "/debug/placements?limit=000000001" + 6000 * "9", None),
    ],
)
def test_an_administrator_that_errs_is_told_so(method: str, path: str, body: Any) -> None:
    async def test() -> None:
        async with rig() as made:
            answer = await made.http.request(method, made.url + path, json=body, headers=ADMIN)
            assert 400 <= answer.status < 500, await answer.text()

    run(test())
