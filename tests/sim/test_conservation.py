"""The sums that must hold in every run do hold, and a run in which one does not is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria.policy.instance import Report
from talaria.report.conservation import ConservationError
from talaria.report.record import OUTCOMES, RunRecord
from talaria.sim import config
from talaria.sim.cluster import Cluster
from talaria.sim.instance import SimInstance
from talaria.sim.memory import InstanceMemory
from talaria.sim.run import RunPlan, simulate
from tests.sim.small import small_plan
from tests.sim.worlds import chain, random_sessions, session_of, with_small_memory, world

FAILED = OUTCOMES.index("failed")


def hold(plan: RunPlan, record: RunRecord, calls: int) -> None:
    """What a record must satisfy whatever was simulated (the run itself has checked memory and open calls)."""
    rows = record.calls
    assert len(rows) == calls
    served = rows["outcome"] == OUTCOMES.index("completed")
    parts = rows["device_tokens"].astype(int) + rows["host_tokens"] + rows["recomputed_tokens"]
    assert (parts[served] <= rows["prompt_tokens"][served]).all()
    assert (rows["placed_s"] <= rows["admitted_s"] + 1e-4).all()
    assert (rows["admitted_s"] <= rows["ttft_s"] + 1e-4).all() and (rows["ttft_s"] <= rows["e2e_s"] + 1e-4).all()
    rounds = record.rounds
    assert np.allclose(rounds["wall_s"], rounds["active_s"] + rounds["switch_s"], atol=1e-6)
    slots = record.slots
    busy_s = slots["prefill_s"] + slots["sp_s"] + slots["decode_s"] + slots["linger_s"]
    open_s = (slots["closed_s"] - slots["opened_s"]).sum()
    # A batch admitted while a decode step runs waits for its end: that rest counts as decode and as the batch's own time.
    overlap_s = 0.1 * (slots["p_admitted"].sum() + slots["sp_admitted"].sum())
    assert busy_s.sum() <= open_s + overlap_s + 1e-6 * open_s  # busy seconds are kept as float32
    hardware = plan.instances[0].profile.hardware
    assert record.peak_hbm_bytes <= hardware.device_cap_bytes
    assert record.leases_used + record.leases_unused <= record.leases_granted


@pytest.mark.parametrize("config_name", [name for name in config.CONFIGS if name != "full"])
def test_every_configuration_conserves(config_name: str) -> None:
    plan = small_plan("quickstart", config_name, 8)
    record = simulate(plan, 2)
    hold(plan, record, len(record.calls))
    assert (record.calls["outcome"] == OUTCOMES.index("completed")).all()


@pytest.mark.parametrize("scenario", ["hot-cold", "four-by-five", "paper-tp4-high", "paper-tp4-tau"])
def test_every_scenario_conserves(scenario: str) -> None:
    plan = small_plan(scenario, "talaria", 8)
    record = simulate(plan, 3)
    hold(plan, record, len(record.calls))


# --- corrupted runs -------------------------------------------------------------------------------------------------------


def lose_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has ended is counted twice."""
    ended = Cluster._call_ended

    def twice(self: Cluster, live: Any, index: int) -> None:
        ended(self, live, index)
        if index == 0:
            self._ended += 1

    monkeypatch.setattr(Cluster, "_call_ended", twice)


def keep_pages_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory forgets to unlock what a finished call held."""
    monkeypatch.setattr(InstanceMemory, "finish", lambda self, run, now_s: self._paths.__setitem__(run.view.call.key, (run.node, 64)))


def keep_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of restores are never given back."""
    monkeypatch.setattr(InstanceMemory, "restored", lambda self, run: None)


def stretch_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round claims more wall time than its parts have."""
    execute = SimInstance._execute

    def stretched(self: SimInstance, command: Any) -> None:
        if isinstance(command, Report):
            command = Report(replace(command.round, started_s=command.round.started_s - 1.0))
        execute(self, command)

    monkeypatch.setattr(SimInstance, "_execute", stretched)


def miscount_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's parts do not add up to it."""
    admit = InstanceMemory.admit

    def wrong(self: InstanceMemory, run: Any, grant: int, now_s: float) -> str | None:
        answer = admit(self, run, grant, now_s)
        run.lost_tokens += 64
        return answer

    monkeypatch.setattr(InstanceMemory, "admit", wrong)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (lose_a_call, "ended"),
        (keep_pins, "DMA pins left|still held"),
        (stretch_rounds, "wall .* != active"),
        (miscount_tokens, "device . host . recomputed . new"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_run_that_does_not_add_up_is_refused(
    corrupt: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt(monkeypatch)
    with pytest.raises(ConservationError, match=complaint):
        simulate(small_plan("quickstart", "talaria", 6), 1)


def test_pages_that_stay_locked_are_found_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_pages_locked(monkeypatch)
    with pytest.raises(ConservationError, match="pages still locked"):
        simulate(world(tmp_path, [chain("s", 2)]), 0)


# --- random small clusters --------------------------------------------------------------------------------------------------

groups = st.lists(
    st.fixed_dictionaries(
        {
            "pool": st.sampled_from(["cold", "cold", "hot"]),
            "max_resident_models": st.sampled_from([1, 2, 3]),
            "max_running": st.sampled_from([1, 4, 256]),
            "inflight_kv": st.sampled_from(["swap", "recompute"]),
        }
    ),
    max_size=2,
)
some_knobs = st.fixed_dictionaries(
    {
        "tau": st.sampled_from([0.0, 1.0, 20.0]),
        "linger": st.sampled_from([0.0, 1.5]),
        "overload": st.sampled_from(["spill", "queue", "shed"]),
        "visit_idle": st.booleans(),
        "round_order": st.sampled_from(["stable", "oldest"]),
        "nu": st.sampled_from([0.0, 20.0]),
    }
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=random_sessions, swap=st.sampled_from(["swap", "recompute"]), kv_tokens=st.sampled_from([4000, 20_000, 100_000]), hot=st.booleans()
)
def test_devices_short_of_memory_conserve_and_refuse_only_what_never_fits(
    rows: Any, swap: str, kv_tokens: int, hot: bool, tmp_path: Path
) -> None:
    work = [session_of(number, items) for number, items in enumerate(rows)]
    group = {"count": 1, "inflight_kv": swap, "pool": "hot" if hot else "cold"}
    plan = with_small_memory(world(tmp_path, work, instances=({"count": 1, "inflight_kv": swap}, group)), kv_tokens)
    record = simulate(plan, 0)
    hold(plan, record, sum(len(items) for items in rows))
    failed = record.calls["outcome"] == FAILED
    assert (record.calls["prompt_tokens"][failed] + 800 > 0.5 * kv_tokens).all()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=random_sessions,
    hot=groups,
    knobs=some_knobs,
    config_name=st.sampled_from(["talaria", "no-hkvr", "round-only", "round-robin"]),
    seed=st.integers(0, 9),
)
def test_random_traces_on_random_clusters_conserve(
    rows: Any, hot: Any, knobs: dict[str, Any], config_name: str, seed: int, tmp_path: Path
) -> None:
    work = [session_of(number, items) for number, items in enumerate(rows)]
    plan = world(tmp_path, work, instances=({"count": 1}, *hot), config_name=config_name, knobs=knobs, noise=True)
    record = simulate(plan, seed)
    hold(plan, record, sum(len(items) for items in rows))
    if knobs["overload"] == "spill":
        assert (record.calls["outcome"] == OUTCOMES.index("completed")).all()


def test_a_call_that_outgrows_the_memory_fails_when_it_does(tmp_path: Path) -> None:
    plan = with_small_memory(world(tmp_path, [chain("grows", 1, output=3000), chain("fits", 2)]), 4000)
    record = simulate(plan, 0)
    failed = record.calls["outcome"] == FAILED
    assert failed.sum() == 1 and (record.calls["ttft_s"][failed] < record.calls["e2e_s"][failed]).all()
