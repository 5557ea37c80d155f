"""Snapshots travel: what a router knows is late, and a run stands it (SPEC §3.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from talaria.policy.instance import EngineView
from talaria.policy.snapshot import InstanceSnapshot
from talaria.report.record import OUTCOMES
from talaria.sim.run import simulate
from tests.sim.worlds import chain, world

COMPLETED = OUTCOMES.index("completed")


class SnapshotLog:
    """Stands in for a decision log and keeps what the router was told, and when."""

    def __init__(self) -> None:
        self.observed: list[tuple[InstanceSnapshot, float]] = []
        self.heartbeats: list[float] = []

    def header(self, **described: Any) -> None: ...

    def router(self, method: str, arguments: Any, result: Any, now_s: float) -> None:
        if method == "observe":
            self.observed.append((arguments[0], now_s))
        elif method == "heartbeat":
            self.heartbeats.append(now_s)

    def slots(self, instance: str, event: Any, view: EngineView, now_s: float, commands: Any) -> None: ...


def told(folder: Path, **telemetry: float) -> tuple[SnapshotLog, Any]:
    log = SnapshotLog()
    work = [chain(f"s{number}", 8, gap_s=1.0) for number in range(6)]
    record = simulate(world(folder, work, instances=({"count": 2},), telemetry=telemetry), 0, log=log)  # type: ignore[arg-type]
    return log, record


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 1.5])
def test_a_snapshot_arrives_its_delay_after_it_was_taken(delay_s: float, tmp_path: Path) -> None:
    log, record = told(tmp_path, delay_s=delay_s, heartbeat_s=1.0)
    late = [now_s - snapshot.time_s for snapshot, now_s in log.observed if now_s > 0.0]
    assert late and np.allclose(late, delay_s)
    assert (record.calls["outcome"] == COMPLETED).all()


def test_versions_and_submissions_seen_only_rise(tmp_path: Path) -> None:
    log, _ = told(tmp_path, delay_s=0.5, heartbeat_s=1.0)
    for name in ("cold-0", "cold-1"):
        snapshots = [snapshot for snapshot, _ in log.observed if snapshot.instance == name]
        assert [item.version for item in snapshots] == sorted({item.version for item in snapshots})
        assert [item.seen_seq for item in snapshots] == sorted(item.seen_seq for item in snapshots)


def test_an_instance_without_news_is_still_known_to_be_alive(tmp_path: Path) -> None:
    log, _ = told(tmp_path, heartbeat_s=0.5)
    assert len(log.heartbeats) > 0


def test_stale_telemetry_keeps_new_placements_back_but_loses_no_call(tmp_path: Path) -> None:
    """Nothing is fresh for longer than a blink: calls without a lease find no candidate and spill."""
    work = [chain(f"s{number}", 3, gap_s=2.0) for number in range(6)]
    plan = world(tmp_path, work, knobs={"stale_after": 0.05}, telemetry={"heartbeat_s": 5.0, "delay_s": 0.2})
    record = simulate(plan, 0)
    assert (record.calls["outcome"] == COMPLETED).all() and len(record.calls) == 18
