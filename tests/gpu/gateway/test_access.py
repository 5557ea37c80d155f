"""Who may do what, under which name of a model, and how much of it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from talaria.errors import InputError
from talaria.gpu.dialects import Problem
from talaria.gpu.gateway.settings import Settings
from talaria.policy.knobs import Knobs
from tests.gpu.gateway.fake import ADMIN, FakeAgent, Submitted, cluster_of, rig, run, say, until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEYS = [
    {"name": "alice", "key": {"value": "sk-alice"}, "max_in_flight": 2, "max_leases": 2},
    {"name": "bob", "key": {"value": "sk-bob"}},
]
ALICE, BOB = {"authorization": "Bearer sk-alice"}, {"x-api-key": "sk-bob"}


def test_a_key_is_needed_where_there_are_keys() -> None:
    async def test() -> None:
        async with rig(keys=KEYS) as made:
            for headers in (ALICE, BOB):
                assert (await made.post(CHAT, say("hi"), headers)).status == 200
                assert (await made.get("/v1/models", headers)).status == 200
            for wrong in ({}, {"authorization": "Bearer sk-alicf"}, {"authorization": "Basic sk-alice"}, {"x-api-key": ""}, ADMIN):
                openai, anthropic = await made.post(CHAT, say("hi"), wrong), await made.post(MESSAGES, say("hi"), wrong)
                assert openai.status == anthropic.status == 401
                assert (await openai.json())["error"]["type"] == "authentication_error"
                assert (await anthropic.json()) == {
                    "type": "error",
                    "error": {"type": "authentication_error", "message": (await openai.json())["error"]["message"]},
                }
                assert (await made.get("/v1/models", wrong)).status == 401
            assert [item.call.key.tenant for item in made.agents[0].submitted] == ["alice", "bob"]

    run(test())


def test_the_clients_key_stays_at_the_gateway() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        shown: list[Any] = []
        original = agent._answer

        async def watched(request: aiohttp.web.BaseRequest, asked: Submitted) -> aiohttp.web.StreamResponse:
            shown.append(dict(request.headers))
            return await original(request, asked)

        agent._answer = watched  # type: ignore[method-assign]
        async with rig(agent, keys=KEYS) as made:
            assert (await made.post(CHAT, say("hi"), ALICE)).status == 200
        assert "sk-alice" not in str(shown) and "agent-key" in str(shown)

    run(test())


def test_admin_and_debug_need_the_admin_key() -> None:
    async def test() -> None:
        async with rig(keys=KEYS) as made:
            for path in ("/admin/instances", "/debug/sessions", "/debug/placements", "/admin/records"):
                for wrong in ({}, ALICE):
                    assert (await made.get(path, wrong)).status == 401
            assert (await made.get("/debug/sessions", ADMIN)).status == 200
            for path in ("/health", "/ready", "/metrics", "/openapi.json"):
                assert (await made.get(path)).status == 200

    run(test())


def test_without_an_admin_key_there_is_no_admin() -> None:
    async def test() -> None:
        async with rig(admin_key=None) as made:
            assert (await made.get("/admin/instances", ADMIN)).status == 404
            assert (await made.post("/admin/drain", {"instance": "a"}, ADMIN)).status == 404
            assert (await made.get("/debug/sessions")).status == 200

    run(test())


def test_a_key_from_an_unset_variable_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TALARIA_TEST_KEY", raising=False)
    config = cluster_of((FakeAgent("a"),), keys=[{"name": "alice", "key": {"env": "TALARIA_TEST_KEY"}}])
    with pytest.raises(InputError, match="TALARIA_TEST_KEY"):
        Settings(config)


def test_aliases_name_models_exactly_or_by_their_beginning() -> None:
    aliases = {"gpt-5": "m", "claude-*": "m", "claude-haiku-*": "n", "claude-haiku-4": "m"}
    settings = Settings(cluster_of((FakeAgent("a", "m", "n"),), aliases=aliases))
    names = {"m": "m", "n": "n", "gpt-5": "m", "claude-opus-4-1": "m", "claude-haiku-4-5": "n", "claude-haiku-4": "m"}
    assert {name: settings.served_name(name) for name in names} == names
    for unknown in ("gpt-5.1", "", None, 7):
        with pytest.raises(Problem):
            settings.served_name(unknown)
    default = Settings(cluster_of((FakeAgent("a", "m", "n"),), aliases=aliases, default_model="n"))
    assert [default.served_name(name) for name in ("gpt-5.1", None, "m")] == ["n", "n", "m"]


def test_only_the_models_name_is_rewritten() -> None:
    async def test() -> None:
        async with rig(FakeAgent("a", "m"), aliases={"claude-*": "m"}) as made:
            body = {**say("hi", model="claude-x"), "max_tokens": 5, "temperature": 0.5, "tools": [{"name": "ß", "x": [1, 2.5, None]}]}
            assert (await made.post(MESSAGES, body)).status == 200
            assert made.agents[0].submitted[0].document == {**body, "model": "m"}
            assert made.agents[0].submitted[0].call.key.model == "m"

    run(test())


class Hold:
    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, submitted: Submitted) -> None:
        await self.open.wait()


def test_a_key_has_its_own_limit_of_calls_in_flight() -> None:
    async def test() -> None:
        agent, hold = FakeAgent("a"), Hold()
        agent.before = hold
        async with rig(agent, keys=KEYS) as made:
            held = [asyncio.create_task(made.post(CHAT, say(f"{n}"), ALICE)) for n in range(2)]
            await until(lambda: len(agent.submitted) == 2)
            for path in (CHAT, MESSAGES):
                refused = await made.post(path, say("more"), ALICE)
                assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
                assert (await refused.json())["error"]["type"] in ("rate_limit_error",)
            others = asyncio.create_task(made.post(CHAT, say("mine"), BOB))
            await until(lambda: len(agent.submitted) == 3)
            hold.open.set()
            assert [(await task).status for task in (*held, others)] == [200, 200, 200]
            assert (await made.post(CHAT, say("again"), ALICE)).status == 200

    run(test())


def test_the_gateway_has_a_limit_of_calls_in_flight() -> None:
    async def test() -> None:
        agent, hold = FakeAgent("a"), Hold()
        agent.before = hold
        async with rig(agent, limits={"in_flight": 1}) as made:
            held = asyncio.create_task(made.post(CHAT, say("hi")))
            await until(lambda: bool(agent.submitted))
            assert (await made.post(CHAT, say("hi"))).status == 503
            hold.open.set()
            assert (await held).status == 200

    run(test())


def test_a_key_has_its_own_limit_of_leases() -> None:
    async def test() -> None:
        async with rig(keys=KEYS, knobs=Knobs(tau_s=60.0)) as made:
            for n in range(5):
                for headers in (ALICE, BOB):
                    assert (await made.post(CHAT, say(f"task {n}"), headers)).status == 200
            sessions = (await (await made.get("/debug/sessions", ADMIN)).json())["sessions"]
            leased = [item["tenant"] for item in sessions for line in item["lines"] if line["lease"]]
            assert (leased.count("alice"), leased.count("bob")) == (2, 5)

    run(test())


def test_a_body_has_a_limit() -> None:
    async def test() -> None:
        async with rig(limits={"body_bytes": 2048}) as made:
            assert (await made.post(CHAT, say("x" * 1000))).status == 200
            for path, kind in ((CHAT, "invalid_request_error"), (MESSAGES, "request_too_large")):
                refused = await made.post(path, say("x" * 3000))
                assert refused.status == 413 and (await refused.json())["error"]["type"] == kind

            async def parts() -> Any:
                for _ in range(10):
                    yield b" " * 1000

            async with made.http.post(made.url + CHAT, data=parts()) as refused:
                assert refused.status == 413

    run(test())


def test_what_is_not_there_and_what_is_not_taken() -> None:
    async def test() -> None:
        async with rig() as made:
            assert (await made.get("/nowhere")).status == 404
            wrong = await made.get(CHAT)
            assert wrong.status == 405 and wrong.headers["allow"] == "POST"
            assert (await made.get("/v1/responses/r1")).status == 404

    run(test())
