"""Other systems on our instances: each has its own placements, and what its rule is blind to shows in the run."""

from __future__ import annotations

from itertools import combinations

import pytest

from talaria.policy.peers.base import PeerRouter
from talaria.policy.router import ROUTERS
from talaria.report.record import REASONS, RunRecord
from talaria.sim import config
from talaria.sim.run import plan, simulate
from talaria.sim.scenario import load

PEERS = tuple(name for name, router in ROUTERS.items() if issubclass(router, PeerRouter))


@pytest.fixture(scope="module")
def runs() -> dict[str, RunRecord]:
    scenario = load("paper-tp4-high")
    return {name: simulate(plan(scenario, config.get(name)), 0) for name in ("full", *PEERS)}


def placements(run: RunRecord) -> dict[tuple[int, ...], int]:
    """Instance of every call, by session, line and turn."""
    names = zip(*(run.calls[column].tolist() for column in ("session", "line", "turn")), strict=True)
    return dict(zip(names, run.calls["instance"].tolist(), strict=True))


def test_every_pair_of_systems_places_some_call_differently(runs: dict[str, RunRecord]) -> None:
    where = {name: placements(run) for name, run in runs.items()}
    for one, other in combinations(where, 2):
        assert where[one].keys() == where[other].keys()
        assert where[one] != where[other], f"{one} and {other} are the same"


@pytest.mark.parametrize(("name", "reasons"), [
    ("aegaeon", {"group", "backlog"}), ("serverlessllm", {"startup"}), ("preble", {"exploit", "explore"}), ("mooncake", {"ttft"}),
    ("continuum", {"lease", "pressure"}), ("sglang-cache-aware", {"prefix", "pressure"}),
])  # fmt: skip
def test_every_branch_of_a_rule_is_taken(runs: dict[str, RunRecord], name: str, reasons: set[str]) -> None:
    assert {REASONS[code] for code in set(runs[name].calls["reason"].tolist())} == reasons


def test_rules_that_follow_the_kv_bring_sessions_back_and_others_do_not(runs: dict[str, RunRecord]) -> None:
    moved = {name: sum(len(homes) > 1 for homes in instances_of(run).values()) for name, run in runs.items()}
    followers = {"full", "preble", "continuum", "sglang-cache-aware"}
    assert max(moved[name] for name in followers) < min(moved[name] for name in ("aegaeon", "mooncake")), moved


def instances_of(run: RunRecord) -> dict[int, set[int]]:
    """Instances that served a session, by session."""
    found: dict[int, set[int]] = {}
    for (session, *_), instance in placements(run).items():
        found.setdefault(session, set()).add(instance)
    return found
