"""Gateways, agents and links that come and go: nothing is counted twice, and what can be known again is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from talaria.gpu.agent.snapshots import SnapshotWriter
from talaria.gpu.gateway.instances import Numbering
from talaria.gpu.gateway.snapshots import SnapshotReader
from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol.agent import now_s
from talaria.policy.calls import LineKey
from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import LineState, Tier
from tests.gpu.gateway.fake import ADMIN, FakeAgent, Submitted, rig, run, say, until
from tests.policy.clusters import model, snapshot

CHAT = "/v1/chat/completions"
LONG = replace(Knobs(), tau_s=60.0)


def test_a_new_gateway_takes_over_leases_and_sessions() -> None:
    async def test() -> None:
        a, b = FakeAgent("a"), FakeAgent("b")
        headers = {"x-session-id": "s1"}
        async with rig(a, b, knobs=LONG) as made:
            assert (await made.post(CHAT, say("task " * 50), headers)).status == 200
        home, other = (a, b) if a.submitted else (b, a)
        first = home.submitted[0].call
        home.leases = [(tuple(first.key), now_s() - 1.0, now_s() + 50.0)]
        home.changes = {"round_load_s": 3.0}  # dearer, so that only the lease sends the return here
        async with rig(a, b, knobs=LONG) as made:
            assert (await made.post(CHAT, say("task " * 50, "it works well", "go on " * 20), headers)).status == 200
            back = home.submitted[-1].call
            assert len(home.submitted) == 2 and not other.submitted
            assert back.key == first.key and back.turn == 1 and 0 < back.reusable_tokens <= first.prompt_tokens + 20
            placement = (await (await made.get("/debug/placements", ADMIN)).json())["placements"][0]
            assert placement["explanation"]["reason"] == "lease"
            assert home.submitted[-1].seq == 1

    run(test())


def test_leases_that_are_over_are_not_taken_over() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.leases = [(("default", "s", "m", "l"), 0.0, now_s() - 1.0)]
        async with rig(agent, knobs=LONG):
            pass
        assert not agent.heard

    run(test())


def test_an_agent_that_dies_and_comes_back_gets_calls_numbered_from_one() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent) as made:
            for _ in range(3):
                assert (await made.post(CHAT, say("hi"))).status == 200
            await agent.stop()
            waiting = asyncio.create_task(made.post(CHAT, say("hi")))
            agent.forget_everything()
            await agent.start()
            assert (await waiting).status == 200
            assert [item.seq for item in agent.submitted] == [1, 2, 3, 1]
            assert (await made.settled())["completed"] == 4

    run(test())


def test_a_gap_in_an_agents_numbers_is_filled_when_its_link_is_back() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent) as made:
            for _ in range(3):
                assert (await made.post(CHAT, say("hi"))).status == 200
            await made.settled()
            agent.seen = 1  # two submissions were lost, and what was said of them too
            await agent.drop_link()
            await until(lambda: agent.seen == 3)
            assert [item.seq for item in agent.heard if isinstance(item, wire.Void)] == [2, 3]

    run(test())


def test_a_link_that_breaks_does_not_disturb_calls_or_numbers() -> None:
    async def test() -> None:
        agent, gate = FakeAgent("a"), asyncio.Event()

        async def hold(submitted: Submitted) -> None:
            await gate.wait()

        async with rig(agent) as made:
            assert (await made.post(CHAT, say("hi"))).status == 200
            agent.before = hold
            call = asyncio.create_task(made.post(CHAT, say("hi")))
            await until(lambda: len(agent.submitted) == 2)
            await agent.drop_link()
            await until(lambda: agent.links == 2)
            gate.set()
            assert (await call).status == 200
            assert (await made.post(CHAT, say("hi"))).status == 200
            assert [item.seq for item in agent.submitted] == [1, 2, 3]
            assert (await made.settled())["completed"] == 3

    run(test())


def test_an_agent_that_says_nothing_is_barred_until_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.gpu.gateway.main.WATCH_S", 0.05)

    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent, knobs=replace(Knobs(), stale_after_s=1.5, overload="shed")) as made:
            agent.beats = False
            while (await made.get("/ready")).status == 200:
                await asyncio.sleep(0.01)
            assert (await made.post(CHAT, say("hi"))).status == 503
            agent.beats = True
            while (await made.get("/ready")).status != 200:
                await asyncio.sleep(0.01)
            await agent.publish()
            assert (await made.post(CHAT, say("hi"))).status == 200

    run(test())


def test_an_agent_of_another_name_or_protocol_is_not_talked_to() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent) as made:
            agent.name = "z"
            await agent.drop_link()
            await until(lambda: agent.links >= 2)
            while (await made.get("/ready")).status == 200:
                await asyncio.sleep(0.01)

    run(test())


def test_a_garbled_message_costs_the_link_and_no_more() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        async with rig(agent) as made:
            assert agent._link is not None
            await agent._link.send_bytes(b"\xc1garbled")
            await until(lambda: agent.links == 2)
            await agent.tell(wire.Snapshot(b'{"no": "snapshot"}'))
            await until(lambda: agent.links == 3)
            assert (await made.post(CHAT, say("hi"))).status == 200

    run(test())


def test_numbers_of_router_and_agent_are_kept_apart() -> None:
    made = Numbering()
    made.linked(0)
    assert [made.sent(1), made.sent(2), made.seen(2)] == [1, 2, 2]
    made.linked(1)  # the same agent, which has yet to see the second
    assert (made.sent(3), made.seen(1)) == (3, 1)
    made.linked(0)  # a new one
    assert (made.sent(4), made.seen(1)) == (1, 4)
    made.linked(7)  # one that has had another gateway
    assert (made.sent(5), made.seen(7), made.seen(8)) == (8, 4, 5)


def test_snapshots_are_written_and_read_as_by_the_codec() -> None:
    writer, reader = SnapshotWriter(), SnapshotReader()
    lines = {LineKey("t", f"s{n}", "m", "l"): LineState(Tier.DEVICE, n, float(n)) for n in range(50)}
    for version in range(1, 4):
        changed = {**lines, LineKey("t", "s1", "m", "l"): LineState(Tier.HOST, version, 0.5)}
        made = snapshot("a", {"m": model(), "n": model(free_kv_tokens=version)}, version, lines=changed)
        body = json.dumps(CODEC.encode(made)).encode()
        assert reader.read(body) == made == CODEC.decode(json.loads(body))
        assert json.loads(writer.write(made)) == json.loads(body)
