"""A recording router changes no answer and logs each one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs
from talaria.policy.router import ROUTERS, Router, Usage
from talaria.policy.snapshot import Capabilities
from talaria.report.declog import DecisionLog, read_log
from talaria.report.recording import RecordingRouter
from tests.policy.clusters import call, model, snapshot


def fresh() -> Router:
    return ROUTERS["full"]({"a": Capabilities()}, replace(Knobs(), tau_s=5.0))


def served(asked: Router | RecordingRouter) -> list[object]:
    """What the router answers while it serves one call of a session."""
    asked.observe(snapshot("a", {"m": model()}), 1.0)
    asked.heartbeat("a", True, 1.5)
    placed = asked.place(call(1), 2.0)
    lease = asked.completed(call(1), "a", Usage(1000, 0, 100), 3.0)
    leases = asked.drain_lease_changes()
    asked.session_ended("t", "s")
    return [placed, lease, leases, asked.next_poll_s(), asked.poll(4.0)]


def test_a_recorded_router_answers_as_it_would_alone_and_every_answer_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path) as log:
        answers = served(RecordingRouter(fresh(), log, lambda: 3.5))
    assert answers == served(fresh())
    records = [record for _, record in read_log(path)]
    out = {record["do"]: record["out"] for record in records}
    assert [CODEC.decode(out[method]) for method in ("place", "completed", "drain_lease_changes", "poll")] == [*answers[:3], answers[4]]


def test_a_placement_is_explained_before_it_is_made_and_what_has_no_time_gets_the_clocks(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path) as log:
        served(RecordingRouter(fresh(), log, lambda: 3.5))
    assert [(record["do"], record["now_s"]) for _, record in read_log(path)] == [
        ("observe", 1.0), ("heartbeat", 1.5), ("explain", 2.0), ("place", 2.0), ("completed", 3.0), ("drain_lease_changes", 3.5),
        ("session_ended", 3.5), ("poll", 4.0),
    ]  # fmt: skip
