"""Over stub engines: knobs that change while streams run disturb none of them, and a replay of the decisions follows the change."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml

from talaria.gpu import config
from talaria.gpu.protocol import records
from talaria.gpu.run.client import Client
from talaria.gpu.run.client import completion_body as body
from talaria.gpu.run.local import gateway
from talaria.policy.codec import CODEC
from talaria.report.replay import replay
from tests.gpu.cluster import stub_document
from tests.gpu.gateway.test_admin import log_of

TWO = ({"name": "g0", "models": ["m0", "m1"]}, {"name": "g1", "models": ["m1", "m0"]})
STREAMS, TOKENS, LIMIT_S, POLL_S = 6, 1000, 240.0, 0.02


def policy_file(path: Path, **knobs: float) -> str:
    path.write_text(yaml.safe_dump({"schema": "talaria.policy/1", "knobs": knobs}))
    return str(path)


def decided(read: list[records.Record], method: str) -> list[Any]:
    """The router's answers, in order."""
    lines = [json.loads(item.line) for item in read if isinstance(item, records.DecisionLine)]
    return [CODEC.decode(line["out"]) for line in lines if line.get("do") == method]


async def until(condition: Any) -> None:
    while not await condition():
        await asyncio.sleep(POLL_S)


async def reloaded_under_load(client: Client, file: Path) -> list[records.Record]:
    read: list[records.Record] = []

    async def rows(count: int) -> bool:
        return sum(isinstance(item, records.CallRow) for item in read) >= count

    async def all_open() -> bool:
        return bool((await client.admin("GET", "/admin/instances"))["calls"]["open"] == STREAMS)

    async def reading(stream: Any) -> None:
        async for record in stream:
            read.append(record)

    ids = {model: np.array(await client.vocabulary(model), np.uint32) for model in ("m0", "m1")}
    bodies = [body(model, ids[model][: 16 + number], TOKENS) for number, model in enumerate(["m0", "m1"] * (STREAMS // 2))]
    async with client.records() as stream:
        reader = asyncio.create_task(reading(stream))
        try:
            await client.admin("POST", "/admin/reset", {"record": True})
            assert (await client.send("before", body("m0", ids["m0"], 2))).outcome == "completed"
            streams = [asyncio.create_task(client.send(f"s{number}", item)) for number, item in enumerate(bodies)]
            await until(all_open)
            policy_file(file, tau=7.0, linger=0.0)
            assert "policy" in (await client.admin("POST", "/admin/reload"))["applied"]
            assert await all_open(), "under load"
            answers = await asyncio.gather(*streams)
            assert {(answer.outcome, len(answer.output)) for answer in answers} == {("completed", TOKENS)}
            alone = await client.send("alone", bodies[0])
            assert alone.output.tolist() == answers[0].output.tolist(), "token by token what it is without a change"
            await until(lambda: rows(STREAMS + 2))
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
    return read


def test_a_reload_of_knobs_under_load_disturbs_no_stream(tmp_path: Path) -> None:
    async def test(endpoint: Any) -> list[records.Record]:
        async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as http:
            return await reloaded_under_load(Client(http, endpoint), file)

    file = tmp_path / "policy.yaml"
    document = stub_document(
        tmp_path, TWO, step_s=0.005, engine={"start_timeout_s": 30.0}, policy={"file": policy_file(file, tau=3.0)},
    )  # fmt: skip
    with gateway(config.check(document, "test"), lambda text: None) as endpoint:
        read = asyncio.run(test(endpoint))
    leases = [lease.expires_s - lease.granted_s for lease in decided(read, "completed")]
    assert [round(tau_s, 6) for tau_s in leases] == [3.0] + [7.0] * (STREAMS + 1)
    assert len(decided(read, "set_knobs")) == 1
    tuned = [item.line for item in read if isinstance(item, records.DecisionLine) and '"knobs":{' in item.line and '"slots"' in item.line]
    assert sorted(json.loads(line)["instance"] for line in tuned) == ["g0", "g1"]
    log = tmp_path / "decisions.jsonl"
    log.write_text(log_of(read))
    found = replay(log)
    assert (found.count, found.first) == (0, []) and found.decisions > 50
