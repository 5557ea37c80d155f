"""What a cluster tells an instance of leases, and when: a slot that lingers must not close in the face of its return."""

from __future__ import annotations

import pytest

from talaria.policy.calls import LineKey
from talaria.policy.instance import Arrived, Command, EngineView, Event, LeaseChanged
from talaria.policy.slots import SlotScheduler
from talaria.sim import config, scenario
from talaria.sim.run import plan, simulate


def test_a_return_reaches_its_instance_before_its_lease_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: set[tuple[SlotScheduler, LineKey, float]] = set()
    late: list[LineKey] = []
    arrivals = 0
    step = SlotScheduler.step

    def watched(self: SlotScheduler, event: Event, view: EngineView, now_s: float) -> list[Command]:
        nonlocal arrivals
        if isinstance(event, LeaseChanged):
            ended.add((self, event.key, now_s))
        elif isinstance(event, Arrived):
            arrivals += 1
            if (self, event.call.key, now_s) in ended:
                late.append(event.call.key)
        return step(self, event, view, now_s)

    monkeypatch.setattr(SlotScheduler, "step", watched)
    record = simulate(plan(scenario.load("quickstart"), config.get("talaria")), 0)
    assert record.leases_used > 0 and arrivals == len(record.calls)
    assert late == []
