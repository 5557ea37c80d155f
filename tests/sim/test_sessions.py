"""How sessions run: closed loop, lines beside each other, a pool of places, warm-up, and what happens to a session that is shed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from talaria.report.metrics import metrics
from talaria.report.record import FLAG_WARMUP, OUTCOMES, REASONS, RunRecord
from talaria.sim.run import beyond_evidence, simulate
from talaria.workload.session import Session, TraceCall
from tests.sim.worlds import A, B, C, chain, world

COMPLETED, SHED, FAILED = (OUTCOMES.index(name) for name in ("completed", "shed", "failed"))


def enqueued_s(record: RunRecord) -> list[float]:
    return [float(value) for value in record.calls["enqueued_s"]]


def ended_s(record: RunRecord) -> list[float]:
    return [float(value) for value in record.calls["enqueued_s"] + record.calls["e2e_s"]]


def test_a_call_is_released_its_gap_after_the_previous_one_completed(tmp_path: Path) -> None:
    record = simulate(world(tmp_path, [chain("s", 4, gap_s=2.5)]), 0)
    assert np.allclose(np.array(enqueued_s(record)[1:]) - np.array(ended_s(record)[:-1]), 2.5, atol=1e-5)


def test_gaps_are_capped_where_the_scenario_says(tmp_path: Path) -> None:
    record = simulate(world(tmp_path, [chain("s", 2, gap_s=100.0)], gap_cap_s=3.0), 0)
    assert enqueued_s(record)[1] - ended_s(record)[0] == pytest.approx(3.0, abs=1e-5)


def subagents() -> Session:
    """The main line spawns two subagents, goes on beside them, and its last call waits for both."""
    calls = (
        TraceCall("main", A, 0, 2000, 40),
        TraceCall("sub-1", A, 0, 1000, 4000, 0.2, waits_for=(0,), spawned_by=0),
        TraceCall("sub-2", A, 0, 1000, 400, 0.2, waits_for=(0,), spawned_by=0),
        TraceCall("main", A, 1, 2300, 40, 0.2, waits_for=(0,), reuse_of=0, reuse_tokens=2040),
        TraceCall("main", A, 2, 2600, 40, 1.0, waits_for=(3, 1, 2), reuse_of=3, reuse_tokens=2340),
    )
    return Session("agents", calls)


def test_subagent_lines_run_beside_the_main_line_and_a_call_waits_for_all_of_them(tmp_path: Path) -> None:
    record = simulate(world(tmp_path, [subagents()]), 0)
    released = dict(zip(zip(record.calls["line"].tolist(), record.calls["turn"].tolist(), strict=True), enqueued_s(record), strict=True))
    over = dict(zip(zip(record.calls["line"].tolist(), record.calls["turn"].tolist(), strict=True), ended_s(record), strict=True))
    main, sub_1, sub_2 = 0, 1, 2
    assert released[sub_1, 0] == released[sub_2, 0] == released[main, 1] < min(over[sub_1, 0], over[sub_2, 0])
    assert over[main, 1] < over[sub_1, 0]
    assert released[main, 2] == pytest.approx(max(over[sub_1, 0], over[sub_2, 0], over[main, 1]) + 1.0, abs=1e-5)


def test_a_session_takes_as_long_as_its_longest_line(tmp_path: Path) -> None:
    record = simulate(world(tmp_path, [subagents()]), 0)
    assert metrics(record)["sct_p50_s"] == pytest.approx(max(ended_s(record)) - min(enqueued_s(record)), rel=1e-5)


def test_a_closed_pool_runs_no_more_sessions_than_it_has_places(tmp_path: Path) -> None:
    record = simulate(world(tmp_path, [chain(f"s{number}", 3) for number in range(7)], arrivals="closed_pool:2"), 0)
    session = record.calls["session"]
    starts = [np.array(enqueued_s(record))[session == number].min() for number in range(7)]
    ends = [np.array(ended_s(record))[session == number].max() for number in range(7)]
    for start_s in starts:
        assert sum(begin <= start_s + 1e-5 < end - 1e-5 for begin, end in zip(starts, ends, strict=True)) <= 2


def test_calls_of_the_warm_up_are_left_out_of_every_metric(tmp_path: Path) -> None:
    sessions = [chain(f"s{number}", 3, start_s=20.0 * number) for number in range(4)]
    record = simulate(world(tmp_path, sessions, arrivals="trace", warmup_s=35.0), 0)
    warm = (record.calls["flags"] & FLAG_WARMUP) > 0
    assert warm.tolist() == [value < 35.0 for value in enqueued_s(record)] and warm.sum() == 6
    assert metrics(record)["calls_completed"] == 6


def overloaded(folder: Path, overload: str, **knobs: object) -> RunRecord:
    """More calls at once than one round can hold, all of one model."""
    sessions = [chain(f"s{number}", 3, prompt=60_000) for number in range(12)]
    return simulate(world(folder, sessions, knobs={"overload": overload, **knobs}), 0)


def test_spill_serves_everybody_late(tmp_path: Path) -> None:
    record = overloaded(tmp_path, "spill")
    assert (record.calls["outcome"] == COMPLETED).all() and (record.calls["reason"] == REASONS.index("spill")).any()


def test_queue_holds_calls_at_the_router_until_there_is_room(tmp_path: Path) -> None:
    record = overloaded(tmp_path, "queue", queue_deadline=3600)
    assert (record.calls["outcome"] == COMPLETED).all()
    assert record.calls["placed_s"].max() > 0.0


def test_a_queued_call_is_shed_at_its_deadline(tmp_path: Path) -> None:
    record = overloaded(tmp_path, "queue", queue_deadline=2)
    shed = record.calls["outcome"] == SHED
    first_calls = record.calls["turn"] == 0
    assert shed.any() and np.allclose(record.calls["e2e_s"][shed & first_calls], 2.0, atol=1e-4)


def test_a_shed_session_gives_up_its_remaining_calls_and_the_sums_hold(tmp_path: Path) -> None:
    record = overloaded(tmp_path, "shed")
    outcome, session, turn = record.calls["outcome"], record.calls["session"], record.calls["turn"]
    assert len(outcome) == 36 and set(outcome.tolist()) == {COMPLETED, SHED}
    for number in set(session[outcome == SHED].tolist()):
        mine = session == number
        first = turn[mine & (outcome == SHED)].min()
        assert (outcome[mine & (turn >= first)] == SHED).all() and (outcome[mine & (turn < first)] == COMPLETED).all()
    shown = metrics(record)
    assert shown["calls_completed"] == (outcome == COMPLETED).sum() and shown["calls_shed"] == (outcome == SHED).sum()


def test_other_lines_of_a_failed_session_stop_too(tmp_path: Path) -> None:
    """A prompt larger than the KV pool fails; its session's other lines finish the call they are in and plan no more."""
    big = TraceCall("sub", A, 0, 3_000_000, 10, spawned_by=0, waits_for=(0,))
    main = chain("s", 30).calls
    calls = (main[0], big, *(_shifted(call) for call in main[1:]))
    record = simulate(world(tmp_path, [Session("doomed", calls), chain("fine", 3, model=B)], knobs={"overload": "spill"}), 0)
    outcome, session = record.calls["outcome"], record.calls["session"]
    doomed = session == session[outcome == FAILED][0]
    assert (outcome == FAILED).sum() == 1 and (outcome[doomed] == SHED).any() and (outcome[~doomed] == COMPLETED).all()


def _shifted(call: TraceCall) -> TraceCall:
    """The call one place later in its session."""
    earlier = call.turn - 1
    at = earlier if earlier == 0 else earlier + 1
    return TraceCall("main", C if call.model == C else A, call.turn, call.prompt_tokens, 40, 0.5, (at,), None, at, call.reuse_tokens)


def test_batches_larger_than_any_that_was_measured_are_said(tmp_path: Path) -> None:
    def said(sessions: int) -> list[str]:
        work = [chain(f"s{number}", 1, model="Qwen3-32B", output=400) for number in range(sessions)]
        made = world(tmp_path, work, instances=({"count": 1, "pool": "hot"},), profile="b200", models=["Qwen3-32B"])
        return beyond_evidence(made, simulate(made, 0))

    assert said(20) == []
    (sentence,) = said(60)
    assert sentence.startswith("profile b200 is extrapolated: Qwen3-32B decode to batch ") and sentence.endswith("(points end at 32)")
