"""Small worlds for the simulator's tests: sessions written out by hand, on a scenario of a few instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from talaria.sim import config
from talaria.sim.run import RunPlan, plan
from talaria.sim.scenario import Scenario
from talaria.workload.rules import TraceHeader
from talaria.workload.session import Session, TraceCall
from talaria.workload.trace import write_trace

A, B, C = "Qwen3-235B", "GLM5-nvfp4", "Qwen3.5-122B-A10B"


def chain(name: str, depth: int, *, model: str = A, gap_s: float = 0.5, prompt: int = 2000, output: int = 40, **more: Any) -> Session:
    """A session of one line; each call continues the one before in full and adds 300 tokens."""
    calls = [TraceCall("main", model, 0, prompt, output)]
    for turn in range(1, depth):
        reuse = calls[-1].prompt_tokens + output
        calls.append(
            TraceCall("main", model, turn, reuse + 300, output, gap_s, waits_for=(turn - 1,), reuse_of=turn - 1, reuse_tokens=reuse)
        )
    return Session(name, tuple(calls), **more)


def world(
    folder: Path,
    sessions: Sequence[Session],
    *,
    instances: Sequence[Mapping[str, Any]] = ({"count": 1},),
    config_name: str = "talaria",
    arrivals: str = "all_at_once",
    knobs: Mapping[str, object] | None = None,
    **changes: Any,
) -> RunPlan:
    """The plan of a run of ``sessions`` on cold instances of the three models of ``paper-tp8``, without noise."""
    path = folder / "sessions.jsonl"
    write_trace(path, TraceHeader("by hand", times=all(session.start_s is not None for session in sessions)), sessions)
    scenario = Scenario.model_validate(
        {
            "schema": "talaria.scenario/1",
            "name": "by hand",
            "about": "a test",
            "profile": "paper-tp8",
            "models": [A, B, C],
            "instances": list(instances),
            "workload": {"trace": str(path)},
            "arrivals": arrivals,
            "noise": False,
            **changes,
        }
    )
    return plan(scenario, config.get(config_name), knobs=knobs)
