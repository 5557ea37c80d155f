"""Times of tiny runs, computed by hand from the profile: what a user reads as TTFT, SCT, gaps and lease hits."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria.report.metrics import metrics
from talaria.report.record import PATHS, REASONS, RunRecord
from talaria.sim.run import RunPlan, simulate
from talaria.workload.session import Session, TraceCall
from tests.sim.worlds import A, B, chain, world


def run(tmp_path: Path, *sessions: Session, **changes: object) -> tuple[RunPlan, RunRecord]:
    plan = world(tmp_path, sessions, **changes)  # type: ignore[arg-type]
    return plan, simulate(plan, 0)


def test_ttft_is_the_prefill_and_each_further_token_one_step(tmp_path: Path) -> None:
    plan, record = run(tmp_path, Session("a", (TraceCall("main", A, 0, 25_000, 101),)))
    timing = plan.instances[0].profile.timing(A)
    prefill_s = timing.prefill_s(25_000, 0)
    assert record.calls["ttft_s"][0] == pytest.approx(prefill_s)
    assert record.calls["e2e_s"][0] == pytest.approx(prefill_s + 100 * timing.step_s(1, 25_050), rel=1e-5)


def test_a_return_computes_only_what_its_whole_cached_pages_do_not_cover(tmp_path: Path) -> None:
    plan, record = run(tmp_path, chain("a", 2, prompt=25_000, output=101))
    timing = plan.instances[0].profile.timing(A)
    cached_tokens = 25_101 // timing.page_tokens * timing.page_tokens
    assert record.calls["device_tokens"][1] == cached_tokens
    assert record.calls["ttft_s"][1] == pytest.approx(timing.prefill_s(25_401 - cached_tokens, cached_tokens), rel=1e-5)


def test_sct_is_the_calls_and_the_gaps_between_them(tmp_path: Path) -> None:
    _, record = run(tmp_path, chain("a", 4, gap_s=0.25))
    assert metrics(record)["sct_p50_s"] == pytest.approx(sum(record.calls["e2e_s"]) + 3 * 0.25, rel=1e-5)


def test_a_gap_starts_when_the_last_awaited_call_has_ended(tmp_path: Path) -> None:
    spawn, child = TraceCall("main", A, 0, 1_000, 2), TraceCall("child", A, 0, 50_000, 401, 0.1, (0,), spawned_by=0)
    _, record = run(tmp_path, Session("a", (spawn, child, TraceCall("main", A, 1, 1_100, 2, 0.3, (0, 1)))))
    enqueued_s, e2e_s = record.calls["enqueued_s"], record.calls["e2e_s"]
    assert enqueued_s[1] == pytest.approx(e2e_s[0] + 0.1, rel=1e-5)
    assert enqueued_s[2] == pytest.approx(enqueued_s[1] + e2e_s[1] + 0.3, rel=1e-5)


@pytest.mark.parametrize(("gap_s", "reason", "unused"), [(0.999, "lease", 1), (1.0, "cost", 2), (1.001, "cost", 2)])
def test_a_lease_is_live_until_tau_and_no_longer(tmp_path: Path, gap_s: float, reason: str, unused: int) -> None:
    _, record = run(tmp_path, chain("a", 2, gap_s=gap_s, output=2), knobs={"tau": 1})
    assert REASONS[record.calls["reason"][1]] == reason
    assert (record.leases_granted, record.leases_unused) == (2, unused), "the last call's lease waits for nobody"


@pytest.mark.parametrize("config_name", ["talaria", "h2d-only"])
def test_a_call_of_an_opened_but_idle_model_waits_for_one_switch(tmp_path: Path, config_name: str) -> None:
    first = Session("a", (TraceCall("main", A, 0, 1_000, 2),), start_s=0.0)
    second = Session("b", (TraceCall("main", B, 0, 1_000, 2),), start_s=10.0)
    plan, record = run(tmp_path, first, second, config_name=config_name, arrivals="trace")
    timing = plan.instances[0].profile.timing(B)
    assert record.calls["ttft_s"][1] == pytest.approx(timing.h2d_switch_s + timing.prefill_s(1_000, 0), rel=1e-5)
    assert [PATHS[path] for path in record.switches["path"]] == ["h2d"]
    assert (metrics(record)["residency_hit"], metrics(record)["model_opens"]) == (1.0, 0.0)


def test_a_call_of_a_model_that_nobody_holds_waits_for_a_full_open(tmp_path: Path) -> None:
    only = Session("b", (TraceCall("main", B, 0, 1_000, 2),))
    plan, record = run(tmp_path, only, instances=[{"count": 1, "opened": [A]}], open_s=7.0)
    assert record.calls["ttft_s"][0] == pytest.approx(7.0 + plan.instances[0].profile.timing(B).prefill_s(1_000, 0), rel=1e-5)
    assert (metrics(record)["residency_hit"], metrics(record)["model_opens"], metrics(record)["avoidable_opens"]) == (0.0, 1.0, 0.0)
