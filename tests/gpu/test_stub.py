"""The stub engine answers grants and stops as a real engine's plugin does."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from talaria.gpu import config
from talaria.gpu.protocol import engine
from tests.gpu.cluster import STUB
from tests.gpu.holding import MODEL, desk, new_call, running_engine


def test_a_stopped_segment_of_the_stub_keeps_what_it_has(tmp_path: Path) -> None:
    environment = {"STUB_PYTHON": sys.executable, "STUB_STEP_S": "0.005"}
    settings = config.Engine(python=str(STUB), environment=environment, log_dir=str(tmp_path), start_timeout_s=60.0)
    (tmp_path / "config.json").write_text('{"architectures": ["Stub"]}')

    async def check() -> None:
        async with desk(held) as at:
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
            _, whole = await at.post("/v1/completions", body)
            at.agent.steps = (10**6,)
            for moment in (engine.Grant, engine.Progress):
                at.agent.stop_at, call = moment, new_call()
                _, parts = await at.post("/v1/completions", body, call)
                assert json.loads(parts)["choices"] == json.loads(whole)["choices"]
                assert (await at.agent.last(call)).output_tokens == len(at.agent.output(call)) == 200
                reasons = [end.reason for end in at.agent.of(call, engine.Ended)]
                assert reasons[-1] == "finished" and set(reasons[:-1]) == {"stopped"}

    with running_engine(settings, tmp_path, tmp_path) as held:
        asyncio.run(check())
