"""What an administrator does while calls come in, and what a recording says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from talaria.gpu.config import ClusterConfig
from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol import records
from talaria.policy.knobs import Knobs
from talaria.report.declog import SCHEMA
from talaria.report.replay import replay
from tests.gpu.gateway.fake import ADMIN, FakeAgent, Rig, Submitted, cluster_of, rig, run, say, until

CHAT = "/v1/chat/completions"


async def admin(made: Rig, path: str, **document: Any) -> Any:
    answer = await made.post(f"/admin/{path}", document, ADMIN)
    assert answer.status == 200, await answer.text()
    return await answer.json()


def gated() -> tuple[FakeAgent, asyncio.Event]:
    """An agent that answers calls once the event is set."""
    agent, gate = FakeAgent("a"), asyncio.Event()

    async def hold(submitted: Submitted) -> None:
        await gate.wait()

    agent.before = hold
    return agent, gate


def test_a_drained_instance_gets_no_calls_until_it_is_undrained() -> None:
    async def test() -> None:
        a, b = FakeAgent("a"), FakeAgent("b")
        async with rig(a, b, policy={"router": "round-robin"}) as made:
            state = await admin(made, "drain", instance="a")
            assert state["instances"]["a"]["drained"] and not state["instances"]["a"]["healthy"]
            await a.publish()
            await a.tell(wire.Beat(True))
            for _ in range(4):
                assert (await made.post(CHAT, say("hi"))).status == 200
            assert not a.submitted and len(b.submitted) == 4
            await admin(made, "undrain", instance="a")
            for _ in range(4):
                assert (await made.post(CHAT, say("hi"))).status == 200
            assert len(a.submitted) == 2

    run(test())


def test_draining_leaves_calls_alone_that_are_there() -> None:
    async def test() -> None:
        agent, gate = gated()
        async with rig(agent) as made:
            call = asyncio.create_task(made.post(CHAT, say("hi")))
            await until(lambda: bool(agent.submitted))
            await admin(made, "drain", instance="a")
            gate.set()
            assert (await call).status == 200
            assert (await made.get("/ready")).status == 503

    run(test())


def test_a_closed_model_is_placed_nowhere_and_an_opened_one_again() -> None:
    async def test() -> None:
        a, b = FakeAgent("a", "m", "n"), FakeAgent("b", "m", "n")
        async with rig(a, b, knobs=replace(Knobs(), overload="shed"), policy={"router": "round-robin"}) as made:
            await admin(made, "close", model="n", instance="a")
            for _ in range(3):
                assert (await made.post(CHAT, say("hi", model="n"))).status == 200
            assert not a.submitted
            await admin(made, "close", model="n")
            assert (await made.post(CHAT, say("hi", model="n"))).status == 503
            assert (await made.post(CHAT, say("hi", model="m"))).status == 200
            await admin(made, "open", model="n")
            assert (await made.post(CHAT, say("hi", model="n"))).status == 200
            await until(lambda: all(any(isinstance(item, wire.Open) for item in agent.heard) for agent in (a, b)))
            asked = [[item for item in agent.heard if isinstance(item, wire.Open | wire.Close)] for agent in (a, b)]
            assert asked == [[wire.Close("n"), wire.Close("n"), wire.Open("n")], [wire.Close("n"), wire.Open("n")]]
            await admin(made, "close", model="n", instance="a")
            links = a.links
            await a.drop_link()
            await until(lambda: a.links > links and a.heard[-1:] == [wire.Close("n")], "an agent that comes back is told again")

    run(test())


def test_a_reload_changes_keys_aliases_and_limits_at_once() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        await agent.start()
        new: dict[str, Any] = {}

        def reload() -> ClusterConfig:
            return cluster_of((agent,), **new)

        async with rig(agent, reload=reload) as made:
            assert (await made.post(CHAT, say("hi", model="alias"))).status == 404
            new.update(aliases={"alias": "m"}, limits={"body_bytes": 1024})
            answer = await admin(made, "reload")
            assert answer["applied"] == ["keys", "aliases", "limits", "default_model"]
            assert (await made.post(CHAT, say("hi", model="alias"))).status == 200
            assert (await made.post(CHAT, say("x" * 2000))).status == 413
            new.update(keys=[{"name": "k", "key": {"value": "sk"}}])
            await admin(made, "reload")
            assert (await made.post(CHAT, say("hi"))).status == 401
            new.update(keys=[{"name": "k", "key": {"env": "TALARIA_NOT_SET"}}])
            refused = await made.post("/admin/reload", {}, ADMIN)
            assert refused.status == 400 and "TALARIA_NOT_SET" in (await refused.json())["error"]["message"]

    run(test())


def test_a_reload_gives_router_and_agents_new_knobs_under_load_and_agents_again_on_every_link() -> None:
    async def test() -> None:
        agent, gate, new = FakeAgent("a"), asyncio.Event(), {"policy": {"knobs": {"tau": 0.0}}}
        await agent.start()

        async def hold(submitted: Submitted) -> None:
            await gate.wait()

        def told(kind: type) -> list[Any]:
            return [item for item in agent.heard if isinstance(item, kind)]

        agent.before = hold
        async with rig(agent, reload=lambda: cluster_of((agent,), **new)) as made:
            call = asyncio.create_task(made.post(CHAT, say("hi")))
            await until(lambda: bool(agent.submitted))
            assert "policy" in (await admin(made, "reload"))["applied"]
            await until(lambda: bool(told(wire.Tune)))
            assert b'"tau_s":0.0' in told(wire.Tune)[0].knobs and not told(wire.Reset)
            gate.set()
            assert (await call).status == 200
            await until(lambda: bool(told(wire.Lease)))
            assert told(wire.Lease)[0].expires_s is None, "without tau nothing is reserved"
            assert "policy" not in (await admin(made, "reload"))["applied"], "it is in force already"
            await agent.drop_link()
            await until(lambda: len(told(wire.Tune)) == 2)

    run(test())


def test_a_reload_gives_router_and_agents_another_router_when_no_call_is_open() -> None:
    async def test() -> None:
        agent, gate, new = FakeAgent("a"), asyncio.Event(), {"policy": {"router": "least-pressure", "knobs": {"tau": 2.0}}}
        await agent.start()

        async def hold(submitted: Submitted) -> None:
            await gate.wait()

        agent.before = hold
        async with rig(agent, reload=lambda: cluster_of((agent,), aliases={"alias": "m"}, **new)) as made:
            call = asyncio.create_task(made.post(CHAT, say("hi")))
            await until(lambda: bool(agent.submitted))
            assert (await made.post("/admin/reload", {}, ADMIN)).status == 409
            gate.set()
            assert (await call).status == 200
            await made.settled()
            assert (await made.post(CHAT, say("hi", model="alias"))).status == 404, "nothing of the refused reload is in force"
            assert "policy" in (await admin(made, "reload"))["applied"]
            (reset,) = (item for item in agent.heard if isinstance(item, wire.Reset))
            assert b'"tau_s":2.0' in reset.knobs
            assert (await made.post(CHAT, say("hi", model="alias"))).status == 200
            assert "policy" not in (await admin(made, "reload"))["applied"], "it is in force already"

    run(test())


def test_a_reload_that_does_not_go_with_what_runs_changes_nothing() -> None:
    async def test() -> None:
        agent, other = FakeAgent("a"), FakeAgent("b", "later")
        await agent.start()
        new: dict[str, Any] = {"host": "0.0.0.0", "keys": [{"name": "k", "key": {"value": "sk"}}]}
        agents: tuple[FakeAgent, ...] = (agent,)

        def reload() -> ClusterConfig:
            return cluster_of(agents, **new)

        async with rig(agent, reload=reload, **new) as made:
            made.url = made.url.replace("0.0.0.0", "127.0.0.1")
            new.clear()  # on loopback, so without keys; but the open port stays until a restart
            assert (await made.post("/admin/reload", {}, ADMIN)).status == 409
            assert (await made.post(CHAT, say("hi"))).status == 401
            agents = (agent, other)
            new.update(host="0.0.0.0", keys=[{"name": "k", "key": {"value": "other"}}], policy={"knobs": {"tau": 2.0}})
            refused = await made.post("/admin/reload", {}, ADMIN)
            assert refused.status == 409
            said = (await refused.json())["error"]["message"]
            assert said == "nothing was applied: models, instances cannot change while the gateway runs; restart it"
            assert (await made.post(CHAT, say("hi"), {"authorization": "Bearer sk"})).status == 200, "nor did the keys change"
            assert not any(isinstance(item, wire.Reset) for item in agent.heard)

    run(test())


def test_admin_requests_that_make_no_sense_are_refused() -> None:
    async def test() -> None:
        async with rig() as made:
            for path, document, status in (
                ("drain", {"instance": "z"}, 404), ("drain", {}, 404), ("close", {"model": "z"}, 404), ("reset", {"router": "z"}, 400),
                ("reset", {"knobs": {"tau": -5}}, 400), ("reset", {"knobs": 3}, 400), ("reset", {"record": True}, 409),
                ("reload", {}, 409), ("reset", {"surprise": 1}, 400), ("drain", [], 400),
            ):  # fmt: skip
                assert (await made.post(f"/admin/{path}", document, ADMIN)).status == status, (path, document)
            assert (await made.get("/debug/placements?limit=x", ADMIN)).status == 400

    run(test())


class Reader:
    """Reads the records of a gateway while the test goes on."""

    def __init__(self, made: Rig) -> None:
        self.read: list[records.Record] = []
        self.done = asyncio.Event()
        self.opened = asyncio.Event()
        self._made = made
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as http, http.get(self._made.url + "/admin/records", headers=ADMIN) as answer:
            assert answer.status == 200
            self.opened.set()
            async for line in answer.content:
                self.read.append(records.decode(line))
        self.done.set()

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.read if isinstance(record, kind)]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def log_of(read: list[records.Record]) -> str:
    """The decision log that a run directory gets."""
    begin = read[0]
    assert isinstance(begin, records.Begin)
    policies = {"router": {"name": begin.router, "arguments": begin.router_arguments}, "slots": begin.slots_arguments}
    header = {"schema": SCHEMA, "scenario": begin.cluster, "config": begin.router, "seed": 0, **policies}
    return "\n".join([json.dumps(header), *(item.line for item in read if isinstance(item, records.DecisionLine))]) + "\n"


def test_a_recording_replays_without_a_difference_and_has_a_row_for_each_call(tmp_path: Path) -> None:
    async def test() -> None:
        a, b = FakeAgent("a", "m", "n"), FakeAgent("b", "m", "n")
        async with rig(a, b) as made:
            assert (await made.post(CHAT, say("before"))).status == 200
            await made.settled()
            reader = Reader(made)
            await reader.opened.wait()
            assert (await made.get("/admin/records", ADMIN)).status == 409
            await admin(made, "reset", router="full", knobs={"tau": 60.0}, record=True)
            for agent in (a, b):
                (reset,) = (item for item in agent.heard if isinstance(item, wire.Reset))
                assert reset.record and reset.session_prefill and b'"tau_s":60.0' in reset.knobs
            answers = []
            for turn in range(3):
                texts = [text for _ in range(turn) for text in ("go", "it works well")]
                bodies = [
                    say(f"task {n}", *texts[1:], *(["it works well", "more"][:2] if turn else []), model="mn"[n % 2]) for n in range(6)
                ]
                answers += await asyncio.gather(*(made.post(CHAT, body, {"x-session-id": f"s{n}"}) for n, body in enumerate(bodies)))
                await a.publish(), await b.publish(), await a.tell(wire.Beat(True))
            await a.tell(wire.Switched("m", "n", 1.0, (0.1, 0.2, 0.3, 0.0, 0.0), "h2d", 0.0, 0.0, 0, 5))
            await a.tell(wire.Phase("P", "m", 1.0, 2.0))
            await until(lambda: len(reader.of(records.CallRow)) == 18 and bool(reader.of(records.PhaseRow)))
            rows = reader.of(records.CallRow)
            assert {str(row.call) for row in rows} == {answer.headers[records.CALL_HEADER] for answer in answers}
            assert Counter(row.outcome for row in rows) == {"completed": 18}
            assert Counter(row.lease_hit for row in rows)[True] > 0
            for row in rows:
                assert row.enqueued_s <= row.placed_s <= row.ended_s and row.instance in ("a", "b")
                assert row.device_tokens + row.host_tokens + row.recomputed_tokens <= row.prompt_tokens
            assert len(reader.of(records.SwitchRow)) == 1
            path = tmp_path / "decisions.jsonl"
            path.write_text(log_of(reader.read))
            await reader.stop()

        found = replay(path)
        assert found.count == 0 and found.decisions > 50, found.first

    run(test())


def test_a_reset_needs_an_idle_gateway_and_its_agents() -> None:
    async def test() -> None:
        agent, gate = gated()
        async with rig(agent) as made:
            call = asyncio.create_task(made.post(CHAT, say("hi")))
            await until(lambda: bool(agent.submitted))
            assert (await made.post("/admin/reset", {}, ADMIN)).status == 409
            gate.set()
            assert (await call).status == 200
            await made.settled()
            await admin(made, "reset", router="round-robin")
            assert (await made.post(CHAT, say("hi"))).status == 200
            assert agent.submitted[-1].seq == 1
            await made.settled()
            await agent.stop()
            await until(lambda: agent._link is not None and agent._link.closed)
            while (await made.post("/admin/reset", {}, ADMIN)).status != 409:
                await asyncio.sleep(0.01)

    run(test())


def test_calls_go_on_unrecorded_when_the_reader_leaves() -> None:
    async def test() -> None:
        async with rig() as made:
            reader = Reader(made)
            await reader.opened.wait()
            await admin(made, "reset", record=True)
            await reader.stop()
            while (await (await made.get("/admin/instances", ADMIN)).json())["recording"]:
                await asyncio.sleep(0.01)
            assert (await made.post(CHAT, say("hi"))).status == 200

    run(test())


def test_a_gateway_that_stops_ends_its_recording() -> None:
    async def test() -> None:
        async with rig() as made:
            reader = Reader(made)
            await reader.opened.wait()
            await admin(made, "reset", record=True)
        await reader.done.wait()
        assert isinstance(reader.read[0], records.Begin)

    run(test())


def test_a_reader_that_is_too_slow_is_told_that_its_recording_is_broken() -> None:
    from talaria.gpu.gateway.recording import Recording

    async def test() -> None:
        row = records.PhaseRow("a", "P", "m", 0.0, 1.0)
        made = Recording(most_bytes=3 * len(records.encode(row)))
        for _ in range(10):
            made.add(row)
        assert not made.open
        lines = (await made.next() or b"").splitlines()
        assert [type(records.decode(line)) for line in lines] == [records.PhaseRow] * 3 + [records.Broken]
        assert await made.next() is None

    run(test())
