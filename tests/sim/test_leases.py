"""Leases in whole runs: what a charge does to opens and residency as τ grows (SPEC §3.1), and what their counts add up to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from talaria.report.metrics import metrics
from talaria.report.record import FLAG_LEASE_HIT, FLAG_SAME_INSTANCE
from talaria.sim import config, scenario
from talaria.sim.run import plan, simulate
from tests.sim.small import small_plan
from tests.sim.worlds import chain, world

TAUS = (0.0, 5.0)


@cache
def opens_and_hits(charge: float) -> list[tuple[float, float]]:
    """(model opens, residency hits) at each τ, means over seeds; at ν = 20 s, so that leased demand alone opens no replica (Eq. 2)."""
    loaded = scenario.load("paper-tp4-tau")
    rows = []
    for tau in TAUS:
        swept = plan(loaded, config.get("talaria"), knobs={"tau": tau, "lease_charge": charge, "nu": 20})
        seen = [metrics(simulate(swept, seed)) for seed in range(8)]
        rows.append((float(np.mean([m["model_opens"] or 0.0 for m in seen])), float(np.mean([m["residency_hit"] or 0.0 for m in seen]))))
    return rows


def test_with_a_lease_charge_opens_rise_and_residency_falls_as_tau_grows() -> None:
    (opens, hits), (last_opens, last_hits) = opens_and_hits(2.0)
    assert last_opens > opens + 8 and last_hits < hits - 8 / 120


def test_without_a_charge_opens_do_not_rise_and_residency_does_not_fall() -> None:
    """But for returns whose lease is honoured where their model was closed meanwhile: a call or two of 120; with a charge of 2 s, 15."""
    (opens, hits), (last_opens, last_hits) = opens_and_hits(0.0)
    assert last_opens <= opens + 4 and last_hits >= hits - 4 / 120


def test_a_larger_charge_opens_more_at_the_same_tau() -> None:
    assert opens_and_hits(2.0)[-1][0] > opens_and_hits(0.0)[-1][0]


def test_every_completed_call_installs_a_lease_and_no_lease_counts_twice() -> None:
    record = simulate(small_plan("quickstart", "talaria", 12), 1)
    assert record.leases_granted == len(record.calls)
    assert record.leases_used == ((record.calls["flags"] & FLAG_LEASE_HIT) > 0).sum() > 0
    assert record.leases_used + record.leases_unused <= record.leases_granted


def test_tau_zero_reserves_nothing() -> None:
    loaded = scenario.load("quickstart")
    record = simulate(plan(loaded, config.get("talaria"), knobs={"tau": 0}), 1)
    assert record.leases_used == 0 and not (record.calls["flags"] & FLAG_LEASE_HIT).any()


@pytest.mark.parametrize(("gap_s", "hit"), [(0.5, True), (3.0, False)])
def test_a_return_within_tau_comes_back_by_its_lease(gap_s: float, hit: bool, tmp_path: Path) -> None:
    record = simulate(world(tmp_path, [chain("s", 4, gap_s=gap_s)], instances=({"count": 2},)), 0)
    flags = record.calls["flags"][1:]
    assert ((flags & FLAG_LEASE_HIT) > 0).tolist() == [hit] * 3
    assert ((flags & FLAG_SAME_INSTANCE) > 0).all()
