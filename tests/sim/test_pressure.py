"""What happens at the edges of memory and time: in-flight KV that outgrows the device, and long stretches of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria.report.metrics import metrics
from talaria.sim.run import simulate
from tests.sim.worlds import chain, with_small_memory, world


@pytest.mark.parametrize("config_name", ["talaria", "no-hkvr"])
@pytest.mark.parametrize("inflight_kv", ["swap", "recompute"])
def test_calls_whose_contexts_outgrow_the_device_together_take_turns_and_all_complete(
    config_name: str, inflight_kv: str, tmp_path: Path
) -> None:
    sessions = [chain(f"s{number}", 1, prompt=1000, output=30_000) for number in range(8)]
    plan = world(tmp_path, sessions, instances=({"inflight_kv": inflight_kv},), config_name=config_name)
    record = simulate(with_small_memory(plan, 100_000), 0)
    assert metrics(record)["calls_completed"] == 8


def test_idle_time_costs_no_events(tmp_path: Path) -> None:
    late = [chain("early", 2, start_s=0.0), chain("late", 2, start_s=1.7e9)]
    record = simulate(world(tmp_path, late, arrivals="trace"), 0)
    assert metrics(record)["calls_completed"] == 4
    assert record.events < 200


def test_the_first_call_after_a_long_silence_finds_fresh_telemetry(tmp_path: Path) -> None:
    late = [chain("early", 1, start_s=0.0), chain("late", 1, start_s=1e6)]
    plan = world(tmp_path, late, arrivals="trace", instances=({"count": 2},), knobs={"overload": "shed"})
    assert metrics(simulate(plan, 0))["calls_shed"] == 0
