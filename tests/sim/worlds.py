"""Small worlds for the simulator's tests: sessions written out by hand, on a scenario of a few instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

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


_calls = st.tuples(
    st.sampled_from([A, B, C]),
    st.sampled_from(["main", "main", "main", "sub"]),
    st.sampled_from([1, 64, 700, 5000, 90_000]),
    st.sampled_from([1, 2, 64, 700]),
    st.sampled_from([0.0, 0.01, 0.5, 4.0]),
    st.floats(0.0, 1.0),
)
random_sessions = st.lists(st.lists(_calls, min_size=1, max_size=6), min_size=1, max_size=6)
"""Rows for ``session_of``, one list per session."""


def session_of(number: int, rows: list[Any]) -> Session:
    """Calls of one session; each continues a random share of its line's previous prompt and response."""
    made: list[TraceCall] = []
    last: dict[str, int] = {}
    models: dict[str, str] = {}
    for index, (model, line, prompt, output, gap_s, share) in enumerate(rows):
        line = "main" if index == 0 else line
        model = models.setdefault(line, model)
        before = last.get(line)
        if before is None:
            spawned = None if line == "main" else 0
            made.append(TraceCall(line, model, 0, prompt, output, gap_s, () if index == 0 else (0,), spawned))
        else:
            previous = made[before]
            reuse = int(share * (previous.prompt_tokens + previous.output_tokens))
            made.append(
                TraceCall(line, model, previous.turn + 1, reuse + prompt, output, gap_s, (before,), None, before if reuse else None, reuse)
            )
        last[line] = index
    return Session(f"s{number}", tuple(made))


def with_small_memory(plan: RunPlan, kv_tokens: int) -> RunPlan:
    """The plan on devices whose buffer leaves the largest model about ``kv_tokens`` of KV, and on hosts with little KV."""
    small = []
    for item in plan.instances:
        profile, hardware = item.profile, item.profile.hardware
        largest = max(profile.model(name).weight_bytes + kv_tokens * profile.model(name).kv_bytes_per_token for name in item.models)
        fraction = (largest + hardware.runtime_bytes) / hardware.hbm_bytes
        small.append(replace(item, profile=replace(profile, hardware=replace(hardware, bump_fraction=fraction, host_kv_bytes=2**33))))
    return replace(plan, instances=tuple(small))
