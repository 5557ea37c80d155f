"""Decode in macro-steps is the same run as decode step by step, event for event."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria.report.columns import Columns
from talaria.sim.run import RunPlan, simulate
from tests.sim.small import small_plan
from tests.sim.worlds import random_sessions, session_of, with_small_memory, world

RUNS = [
    ("quickstart", "talaria", 12, 1),
    ("quickstart", "talaria", 12, 2),
    ("quickstart", "no-sp", 12, 3),
    ("quickstart", "round-only", 12, 4),
    ("quickstart", "h2d-only", 8, 5),
    ("paper-tp4-high", "talaria", 12, 6),
    ("paper-tp4-tau", "session-sticky", 12, 7),
    ("hot-cold", "talaria", 8, 8),
    ("four-by-five", "least-pressure", 6, 9),
]


def agree(macro: Columns, steps: Columns) -> None:
    """Equal counts and codes; times equal to nine significant digits (seven where the column keeps float32)."""
    assert len(macro) == len(steps)
    for name in macro.names:
        ours, theirs = macro[name], steps[name]
        if ours.dtype.kind == "f":
            digits = 1e-9 if ours.dtype == np.float64 else 2e-7
            np.testing.assert_allclose(ours, theirs, rtol=digits, atol=1e-8, err_msg=name)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize(("scenario", "config", "sessions", "seed"), RUNS, ids=lambda value: str(value))
def test_macro_steps_equal_single_steps_event_for_event(scenario: str, config: str, sessions: int, seed: int) -> None:
    runs_agree(small_plan(scenario, config, sessions), seed)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=random_sessions,
    swap=st.sampled_from(["swap", "recompute"]),
    pool=st.sampled_from(["cold", "hot"]),
    memory=st.sampled_from([20_000, 1_000_000]),
)
def test_macro_steps_equal_single_steps_on_random_traces(rows: Any, swap: str, pool: str, memory: int, tmp_path: Path) -> None:
    work = [session_of(number, items) for number, items in enumerate(rows)]
    groups = ({"count": 1, "inflight_kv": swap}, {"count": 1, "inflight_kv": swap, "pool": pool})
    runs_agree(with_small_memory(world(tmp_path, work, instances=groups, noise=True), memory), 0)


def runs_agree(plan: RunPlan, seed: int) -> None:
    macro = simulate(plan, seed, timeline=True)
    steps = simulate(replace(plan, macro=False), seed, timeline=True)
    assert macro.phases is not None and steps.phases is not None
    for ours, theirs in (
        (macro.calls, steps.calls),
        (macro.rounds, steps.rounds),
        (macro.slots, steps.slots),
        (macro.switches, steps.switches),
        (macro.phases, steps.phases),
    ):
        agree(ours, theirs)
    assert macro.deadline_risk == steps.deadline_risk and macro.leases_unused == steps.leases_unused
    assert macro.events <= steps.events
