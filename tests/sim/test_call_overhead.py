"""A call's way to its engine: charged once, before it arrives, and part of its TTFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from talaria.report.record import FLAG_SP, REASONS
from talaria.sim.run import RunPlan, simulate
from talaria.workload.session import Session, TraceCall
from tests.sim.worlds import A, B, chain, random_sessions, session_of, world

OVERHEAD_S = 0.0625


def delayed(plan: RunPlan, overhead_s: float = OVERHEAD_S) -> RunPlan:
    instances = []
    for item in plan.instances:
        hardware = replace(item.profile.hardware, call_overhead_s=overhead_s)
        instances.append(replace(item, profile=replace(item.profile, hardware=hardware)))
    return replace(plan, instances=tuple(instances))


def test_it_is_part_of_the_ttft_and_of_nothing_else(tmp_path: Path) -> None:
    plan = world(tmp_path, [Session("a", (TraceCall("main", A, 0, 25_000, 101),))])
    plain, late = simulate(plan, 0).calls, simulate(delayed(plan), 0).calls
    assert late["placed_s"][0] == plain["placed_s"][0], "the way begins at the placement"
    for name in ("admitted_s", "ttft_s", "e2e_s"):
        assert late[name][0] == pytest.approx(plain[name][0] + OVERHEAD_S)


def test_none_takes_no_event(tmp_path: Path) -> None:
    plan = world(tmp_path, [chain("a", 5)])
    assert simulate(delayed(plan, 0.0), 0).events == simulate(plan, 0).events < simulate(delayed(plan), 0).events


def test_a_slot_waits_for_the_return_that_has_used_its_lease_but_is_still_on_its_way(tmp_path: Path) -> None:
    """Without work of the other model the slot would close anyway; with it, the end of the lease must not come before the return."""
    sessions = [chain("a", 4, gap_s=0.2, output=20), chain("b", 4, gap_s=0.2, output=20, model=B)]
    record = simulate(delayed(world(tmp_path, sessions, knobs={"tau": 1, "linger": 1})), 0)
    by_lease = record.calls["reason"] == REASONS.index("lease")
    assert by_lease.sum() == 6 and (record.calls["flags"][by_lease] & FLAG_SP).all()


@settings(max_examples=20, deadline=None)
@given(rows=random_sessions)
def test_nothing_is_lost_on_the_way(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    sessions = [session_of(number, session) for number, session in enumerate(rows)]
    plan = delayed(world(tmp_path_factory.mktemp("w"), sessions, instances=[{"count": 2}]))
    assert len(simulate(plan, 0).calls) == sum(len(session.calls) for session in sessions)
