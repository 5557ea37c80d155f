"""Leases in whole runs: what a charge does to opens and residency as τ grows (SPEC §3.1), and what their counts add up to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from talaria.report.record import FLAG_LEASE_HIT, FLAG_OPEN, FLAG_RESIDENCY_HIT, FLAG_SAME_INSTANCE
from talaria.sim import config, scenario
from talaria.sim.run import plan, simulate
from tests.sim.small import small_plan
from tests.sim.worlds import chain, world

TAUS = (0.0, 5.0)


@dataclass(frozen=True)
class Seen:
    """Means over seeds, of 120 calls."""

    opens: float
    placed_opens: float
    """Of calls that Eq. 1 placed; the others came by a live lease to an instance that had closed their model meanwhile."""
    hits: float


@cache
def sweep(charge: float) -> list[Seen]:
    """At each τ; at ν = 20 s, so that leased demand alone opens no replica (Eq. 2)."""
    loaded = scenario.load("paper-tp4-tau")
    rows = []
    for tau in TAUS:
        swept = plan(loaded, config.get("talaria"), knobs={"tau": tau, "lease_charge": charge, "nu": 20})
        seen = [simulate(swept, seed).calls["flags"] for seed in range(8)]
        opens = [(flags & FLAG_OPEN) > 0 for flags in seen]
        placed = [each & ((flags & FLAG_LEASE_HIT) == 0) for each, flags in zip(opens, seen, strict=True)]
        hits = [(flags & FLAG_RESIDENCY_HIT) > 0 for flags in seen]
        rows.append(Seen(*(float(np.mean([each.sum() for each in kind])) for kind in (opens, placed, hits))))
    return rows


def test_with_a_lease_charge_opens_rise_and_residency_falls_as_tau_grows() -> None:
    without, long = sweep(2.0)
    assert long.opens > without.opens + 8 and long.hits < without.hits - 8


def test_without_a_charge_leases_make_no_other_call_open_a_model() -> None:
    """All that opens more often are the returns that leases bring back to where their model was closed meanwhile."""
    without, long = sweep(0.0)
    assert long.placed_opens <= without.placed_opens and long.opens - long.placed_opens > 0


def test_a_larger_charge_opens_more_at_the_same_tau() -> None:
    charged, free = sweep(2.0)[-1], sweep(0.0)[-1]
    assert charged.opens > free.opens and charged.placed_opens > free.placed_opens


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
