"""The same seed gives the same bytes, in any process, whatever the order of its sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from talaria.sim.run import simulate
from tests.sim.small import small_plan

SCRIPT = """
import hashlib, sys
from talaria.report.metrics import metrics
from talaria.sim.run import simulate
from tests.sim.small import small_plan
for name in ("quickstart", "hot-cold"):
    record = simulate(small_plan(name, "talaria", 6), 3)
    columns = (record.calls, record.rounds, record.slots, record.switches)
    print(hashlib.sha256(repr([item.__getstate__() for item in columns] + [metrics(record)]).encode()).hexdigest())
"""


def run_elsewhere(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True).stdout


def test_a_run_is_the_same_in_every_process_and_under_every_hash_seed() -> None:
    outputs = {run_elsewhere(seed) for seed in ("0", "4242")}
    assert len(outputs) == 1 and len(outputs.pop().split()) == 2


@pytest.mark.parametrize("config", ["talaria", "round-robin"])
def test_different_seeds_are_different_runs(config: str) -> None:
    one, other = (simulate(small_plan("quickstart", config, 6), seed) for seed in (1, 2))
    assert one.calls.__getstate__() != other.calls.__getstate__()


def test_a_second_run_in_the_same_process_is_not_influenced_by_the_first() -> None:
    plan = small_plan("quickstart", "talaria", 6)
    first = simulate(plan, 1).calls.__getstate__()
    simulate(plan, 2)
    assert simulate(plan, 1).calls.__getstate__() == first


def test_configurations_see_the_same_sessions() -> None:
    """Common random numbers: what a session asks for does not depend on the system that serves it."""

    def asked(config: str) -> set[tuple[int, ...]]:
        calls = simulate(small_plan("quickstart", config, 6), 4).calls
        return set(zip(*(calls[name].tolist() for name in ("session", "turn", "model", "prompt_tokens", "output_tokens")), strict=True))

    assert asked("talaria") == asked("round-only") == asked("least-pressure")
