"""What happens to a call on its way: retries, disconnects, deadlines, silence, overload; each ends once."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol.records import CALL_HEADER
from talaria.policy.knobs import Knobs
from tests.gpu.gateway.fake import ADMIN, FakeAgent, Submitted, at_once, event, rig, run, say, until

CHAT = "/v1/chat/completions"


class Gate:
    """Holds submissions until opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, submitted: Submitted) -> None:
        await self.open.wait()


def test_a_stream_arrives_byte_for_byte() -> None:
    async def test() -> None:
        async with rig() as made:
            answer = await made.post(CHAT, say("hi", stream=True))
            chunks = [line for line in (await answer.read()).split(b"\n\n") if line]
            assert chunks[-1] == b"data: [DONE]" and len(chunks) == 4
            assert answer.headers["content-type"].startswith("text/event-stream")
            submitted = made.agents[0].submitted[0]
            assert answer.headers[CALL_HEADER] == str(submitted.call.id)
            assert not submitted.call.exact and submitted.deadline_s == submitted.call.deadline_s

    run(test())


def test_a_stream_to_a_client_of_http_1_0_is_its_events_and_nothing_else() -> None:
    """Such a client knows no chunks: the end of the connection ends the answer."""

    async def test() -> None:
        async with rig() as made:
            answer = await made.post(CHAT, say("hi", stream=True))
            expected = await answer.read()
            http_1_0 = aiohttp.ClientSession(version=aiohttp.HttpVersion10)
            async with http_1_0, http_1_0.post(made.url + CHAT, json=say("hi", stream=True)) as old:
                assert old.status == 200 and "transfer-encoding" not in old.headers
                assert (await old.read()).count(b"\n\n") == expected.count(b"\n\n")

    run(test())


def test_chunks_are_not_held_back() -> None:
    async def test() -> None:
        agent, gate = FakeAgent("a"), Gate()
        agent.between = gate
        async with rig(agent) as made, made.http.post(made.url + CHAT, json=say("hi", stream=True)) as answer:
            assert b'"it"' in await answer.content.readany()
            gate.open.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_agent_is_gone_is_placed_elsewhere(stream: bool) -> None:
    async def test() -> None:
        a, b = FakeAgent("a"), FakeAgent("b")
        async with rig(a, b) as made:

            async def die(submitted: Submitted) -> None:
                a.before = b.before = at_once
                agent = a if a.submitted else b
                asyncio.get_running_loop().create_task(agent.stop())
                await asyncio.sleep(60.0)

            a.before = b.before = die
            answer = await made.post(CHAT, say("hi", stream=stream))
            assert answer.status == 200 and b"works" in await answer.read() and bool(a.submitted) and bool(b.submitted)
            counts = await made.settled()
            assert (counts["completed"], counts["failed"]) == (1, 0)

    run(test())


def test_an_agent_that_drains_is_passed_over_and_told_that_the_number_is_void() -> None:
    async def test() -> None:
        a, b = FakeAgent("a"), FakeAgent("b")
        a.refuse = 503, b'{"error": {"message": "draining"}}'
        async with rig(a, b, policy={"router": "round-robin"}) as made:
            for _ in range(3):
                assert (await made.post(CHAT, say("hi"))).status == 200
            assert len(b.submitted) == 3 and a.submitted
            await until(lambda: any(isinstance(item, wire.Void) for item in a.heard))
            assert (await made.settled())["completed"] == 3

    run(test())


def test_a_stream_that_breaks_off_ends_with_an_error_in_the_clients_format() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.break_off_after = 2
        async with rig(agent) as made:
            for path, body, mark in (
                (CHAT, say("hi", stream=True), b'data: {"error":'),
                ("/v1/messages", say("hi", stream=True), b"event: error\ndata: "),
                ("/v1/responses", {"model": "m", "input": "hi", "stream": True}, b'event: error\ndata: {"type":"error"'),
            ):
                answer = await made.post(path, body)
                assert answer.status == 200 and mark in await answer.read()
            counts = await made.settled()
            assert (counts["failed"], len(agent.submitted)) == (3, 3)

    run(test())


def test_a_client_that_goes_away_is_taken_out_of_the_engine() -> None:
    async def test() -> None:
        agent, gate = FakeAgent("a"), Gate()
        agent.before = gate
        async with rig(agent) as made:
            for count, stream in ((1, False), (2, True)):
                call = asyncio.create_task(made.http.post(made.url + CHAT, json=say("hi", stream=stream)))
                await until(lambda count=count: len(agent.submitted) == count)  # type: ignore[misc]
                call.cancel()
            await until(lambda: all(item.gone.is_set() for item in agent.submitted))
            counts = await made.settled()
            assert (counts["failed"], counts["completed"]) == (2, 0)

    run(test())


def test_a_client_that_goes_away_in_mid_stream_is_taken_out_too() -> None:
    async def test() -> None:
        agent, gate = FakeAgent("a"), Gate()
        agent.between = gate
        async with rig(agent) as made:
            answer = await made.http.post(made.url + CHAT, json=say("hi", stream=True))
            await answer.content.readany()
            answer.close()
            await agent.submitted[0].gone.wait()
            assert (await made.settled())["failed"] == 1

    run(test())


def test_a_client_that_hangs_up_at_the_last_event_had_its_call() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent) as made:
            for _ in range(10):
                answer = await made.http.post(made.url + CHAT, json=say("hi", stream=True))
                body = b""
                while b"[DONE]" not in body:
                    body += await answer.content.readany()
                answer.close()
            assert (await made.settled())["completed"] == 10

    run(test())


def test_a_call_beyond_its_deadline_is_answered_by_an_error() -> None:
    async def test() -> None:
        agent, gate = FakeAgent("a"), Gate()
        agent.before = gate
        async with rig(agent, limits={"call_deadline_s": 1.0}) as made:
            answer = await made.post(CHAT, say("hi"))
            assert answer.status == 504 and "deadline" in (await answer.json())["error"]["message"]
            await until(lambda: all(item.gone.is_set() for item in agent.submitted), "its engine lets go of it")
            assert (await made.settled())["failed"] == 1

    run(test())


def test_a_silent_stream_says_so_from_its_enqueue_on() -> None:
    async def test() -> None:
        agent, before, between = FakeAgent("a"), Gate(), Gate()
        agent.before, agent.between = before, between
        async with (
            rig(agent, limits={"keep_alive_s": 0.05}) as made,
            made.http.post(made.url + CHAT, json=say("hi", stream=True)) as answer,
        ):
            body = b""
            while body.count(b": keep-alive\n\n") < 2:
                body += await answer.content.readany()
            assert body.replace(b": keep-alive\n\n", b"") == b""
            before.open.set()
            while b'"it"' not in body:
                body += await answer.content.readany()
            seen = body.count(b": keep-alive\n\n")
            while body.count(b": keep-alive\n\n") < seen + 2:
                body += await answer.content.readany()
            between.open.set()
            body += await answer.read()
            assert body.endswith(b"data: [DONE]\n\n")
            assert [line for line in body.split(b"\n\n") if line != b": keep-alive"][1:-2] != []

    run(test())


def test_an_error_before_the_first_comment_is_a_status_and_after_it_an_event() -> None:
    async def test() -> None:
        agent, gate = FakeAgent("a"), Gate()
        agent.refuse = 400, b'{"error": {"message": "no such tool"}}'
        async with rig(agent) as made:
            assert (await made.post(CHAT, say("hi", stream=True))).status == 400
        agent.before = gate
        async with rig(agent, limits={"keep_alive_s": 0.05}) as made:
            async with made.http.post(made.url + CHAT, json=say("hi", stream=True)) as answer:
                assert answer.status == 200
                gate.open.set()
                body = await answer.read()
            assert b"no such tool" in body and body.endswith(b"data: [DONE]\n\n")

    run(test())


def test_an_engines_plain_words_become_an_error_in_the_clients_format() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.refuse, agent.refusal_type = (500, b"Internal Server Error"), "text/plain"
        async with rig(agent) as made, made.http.post(made.url + CHAT, json=say("hi")) as answer:
            assert answer.status == 500
            assert (await answer.json())["error"]["message"] == "the engine refused the call"

    run(test())


def test_overload_is_said_in_the_clients_format_with_a_time_to_come_back() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.healthy = False
        async with rig(agent, knobs=replace(Knobs(), overload="shed"), ready=False) as made:
            await until(lambda: agent.links > 0)
            for path, where in ((CHAT, "server_error"), ("/v1/messages", "overloaded_error")):
                answer = await made.post(path, say("hi"))
                assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
                assert (await answer.json())["error"]["type"] == where
            counts = await made.settled()
            assert (counts["shed"], len(agent.submitted)) == (2, 0)

    run(test())


def test_a_queued_call_waits_for_an_instance_and_is_shed_at_its_queues_deadline() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.healthy = False
        async with rig(agent, knobs=replace(Knobs(), overload="queue", queue_deadline_s=0.1), ready=False) as made:
            await until(lambda: agent.links > 0)
            assert (await made.post(CHAT, say("hi"))).status == 503
            counts = await made.settled()
            assert (counts["shed"], counts["completed"]) == (1, 0)
        async with rig(agent, knobs=replace(Knobs(), overload="queue", queue_deadline_s=600.0), ready=False) as made:
            await until(lambda: agent.links > 1)
            waiting = asyncio.create_task(made.post(CHAT, say("hi")))
            while (await made.calls())["open"] == 0:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            agent.healthy = True
            await agent.publish()
            assert (await waiting).status == 200
            counts = await made.settled()
            assert (counts["shed"], counts["completed"]) == (0, 1)

    run(test())


def test_a_queued_call_whose_client_left_is_queued_no_more() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.healthy = False
        async with rig(agent, knobs=replace(Knobs(), overload="queue", queue_limit=1), ready=False) as made:
            await until(lambda: agent.links > 0)
            first = asyncio.create_task(made.http.post(made.url + CHAT, json=say("hi")))
            while (await made.calls())["open"] == 0:
                await asyncio.sleep(0.01)
            first.cancel()
            assert (await made.settled())["failed"] == 1
            second = asyncio.create_task(made.post(CHAT, say("hi")))  # there is room for it: else one of the two would be shed
            while (await made.calls())["open"] == 0:
                await asyncio.sleep(0.01)
            agent.healthy = True
            await agent.publish()
            assert (await second).status == 200
            assert [item.seq for item in agent.submitted] == [1] and not any(isinstance(item, wire.Void) for item in agent.heard)
            assert (await made.settled())["completed"] == 1

    run(test())


def test_a_return_is_routed_by_its_lease_and_the_agent_hears_of_both() -> None:
    async def test() -> None:
        a, b = FakeAgent("a"), FakeAgent("b")
        async with rig(a, b, knobs=replace(Knobs(), tau_s=20.0)) as made:
            first = await made.post(CHAT, say("task " * 100))
            home = a if a.submitted else b
            again = await made.post(CHAT, say("task " * 100, "it works well", "go on " * 50))
            assert first.status == again.status == 200 and len(home.submitted) == 2
            returned = home.submitted[1].call
            assert returned.turn == 1 and returned.reusable_tokens == home.submitted[0].call.prompt_tokens + 20
            await until(lambda: sum(isinstance(item, wire.Lease) for item in home.heard) == 3)
            given, used, successor = (item for item in home.heard if isinstance(item, wire.Lease))
            assert given.expires_s and used.expires_s is None and successor.expires_s and given.key == tuple(returned.key)
            reasons = [
                item["explanation"]["reason"]
                for item in (await (await made.get("/debug/placements", {"authorization": "Bearer root"})).json())["placements"]
            ]
            assert reasons == ["lease", "cost"]

    run(test())


def test_placements_are_found_by_the_id_that_the_client_sends_or_by_its_hash() -> None:
    async def test() -> None:
        async with rig(FakeAgent("a")) as made:
            await made.post(CHAT, say("hi"), {"X-Claude-Code-Session-Id": "cc-0"})
            numbered = (await made.post(CHAT, say("hi"), {"X-Session-Id": "other"})).headers["x-talaria-call"]

            async def placed(query: str) -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = (await (await made.get(f"/debug/placements?{query}", ADMIN)).json())["placements"]
                return found

            (by_id,) = await placed("session=cc-0")
            assert await placed(f"session={by_id['session'][:12]}") == [by_id]
            assert [str(item["call"]) for item in await placed(f"call={numbered}")] == [numbered]
            assert await placed("session=cc-1") == []

    run(test())


def test_every_completed_call_is_answered_by_a_lease_or_its_absence() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent, knobs=replace(Knobs(), tau_s=0.0)) as made:
            await made.post(CHAT, say("task"))
            await until(lambda: any(isinstance(item, wire.Lease) for item in agent.heard))
            assert [item.expires_s for item in agent.heard if isinstance(item, wire.Lease)] == [None]

    run(test())


def test_a_call_whose_books_never_come_is_still_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.gpu.gateway.dispatch.LAST_WORD_S", 0.2)
    monkeypatch.setattr("talaria.gpu.gateway.relay.LAST_WORD_S", 0.1)

    async def test() -> None:
        agent = FakeAgent("a")
        agent.silent_books = True
        async with rig(agent) as made:
            assert (await made.post(CHAT, say("hi"))).status == 200
            assert (await made.settled())["completed"] == 1

    run(test())


def test_many_calls_at_once_all_end_once() -> None:
    async def test() -> None:
        a, b = FakeAgent("a", "m", "n"), FakeAgent("b", "m", "n")
        async with rig(a, b) as made:
            bodies = [say(f"task {n % 20}", model="mn"[n % 2], stream=bool(n % 3)) for n in range(200)]
            answers = await asyncio.gather(*(made.post(CHAT, body, {"x-session-id": f"s{n % 20}"}) for n, body in enumerate(bodies)))
            assert {answer.status for answer in answers} == {200}
            counts = await made.settled()
            assert (counts["accepted"], counts["completed"]) == (200, 200)
            for agent in (a, b):
                assert sorted(item.seq for item in agent.submitted) == list(range(1, len(agent.submitted) + 1))
            page = await (await made.get("/metrics")).text()
            assert "talaria_calls_in_flight" in page and 'talaria_calls_ended_total{model="m",outcome="completed"} 100.0' in page

    run(test())


def test_nothing_a_client_says_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "talaria.gateway")

    async def test() -> None:
        async with rig(keys=[{"name": "alice", "key": {"value": "sk-secret"}}]) as made:
            headers = {"authorization": "Bearer sk-secret", "x-session-id": "my-session-id"}
            assert (await made.post(CHAT, say("a private matter"), headers)).status == 200
            assert (await made.post(CHAT, b"{private", headers)).status == 400
            await made.settled()

    run(test())
    assert "event=call" in caplog.text and "tenant=alice" in caplog.text
    for secret in ("private", "sk-secret", "my-session-id", "agent-key"):
        assert secret not in caplog.text


def test_small_writes_are_not_delayed() -> None:
    """TCP_NODELAY on both sides of the gateway: a chunk must not wait for the acknowledgement of the one before."""
    seen: list[int] = []

    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent) as made:
            original = FakeAgent._answer

            async def watched(self: FakeAgent, request: aiohttp.web.BaseRequest, asked: Submitted) -> aiohttp.web.StreamResponse:
                assert request.transport is not None
                seen.append(request.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                return await original(self, request, asked)

            agent._answer = watched.__get__(agent)  # type: ignore[method-assign]
            for _ in range(2):
                answer = await made.http.post(made.url + CHAT, json=say("hi", stream=True))
                assert json.loads((await answer.read()).split(b"\n\n")[0][6:])["object"] == "chat.completion.chunk"

    run(test())
    assert seen and all(seen)


def test_events_are_told_apart_from_half_events() -> None:
    """A comment in the middle of an event would break it."""

    async def test() -> None:
        agent, gate = FakeAgent("a"), Gate()

        async def halves(submitted: Submitted) -> None:
            await gate.open.wait()

        agent.between = halves
        agent.words = "one two"
        async with rig(agent, limits={"keep_alive_s": 0.03}) as made:
            import tests.gpu.gateway.fake as fake

            whole, parts = fake.chat("m", "one two")
            original = fake.BODIES[CHAT]
            fake.BODIES[CHAT] = lambda model, text: (whole, [parts[0][:-20], parts[0][-20:], *parts[1:]])
            try:
                async with made.http.post(made.url + CHAT, json=say("hi", stream=True)) as answer:
                    body = b""
                    while not body.endswith(parts[0][:-20]):  # comments before it say that nothing has come yet
                        body += await answer.content.readany()
                    assert body.replace(b": keep-alive\n\n", b"") == parts[0][:-20]
                    await asyncio.sleep(0.2)
                    gate.open.set()
                    assert (await answer.read()).startswith(parts[0][-20:])
            finally:
                fake.BODIES[CHAT] = original

    run(test())
    assert event(None, b"x") == b"data: x\n\n"
