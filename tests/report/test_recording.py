"""A recording router changes no answer and logs each one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs
from talaria.policy.leases import Lease
from talaria.policy.router import ROUTERS, Router, Usage
from talaria.policy.snapshot import Capabilities
from talaria.report.declog import DecisionLog, as_line, read_log, slots_knobs_record
from talaria.report.recording import RecordingRouter
from talaria.report.replay import replay
from tests.policy import builders
from tests.policy.clusters import call, key, model, routed, snapshot


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


def test_a_change_of_knobs_is_an_input_that_a_replay_repeats(tmp_path: Path) -> None:
    path, knobs = tmp_path / "decisions.jsonl", Knobs()
    tuned, host = replace(knobs, tau_s=9.0, linger_s=0.0, t_ttft_s=3.0), builders.host("a", "b")
    with DecisionLog(path) as log:
        log.header(
            scenario="s", config="c", seed=0, router="full", router_arguments={"instances": {"a": Capabilities()}, "knobs": knobs},
            slots_arguments={"a": {"knobs": host.knobs}},
        )  # fmt: skip
        asked = RecordingRouter(ROUTERS["full"]({"a": Capabilities()}, knobs), log, lambda: 3.5)
        asked.observe(snapshot("a", {"m": model()}), 1.0)
        asked.set_knobs(tuned, 1.5)
        lease = asked.completed(call(1), "a", Usage(1000, 0, 100), 2.0)
        assert lease is not None and lease.expires_s == 11.0
        host.watch = lambda made, done: log.slots("a", done.event, made.view, done.now_s, done.commands)
        host.submit(builders.call(1, output=900), builders.call(2, "b", output=900))
        host.run(1.0)
        host.scheduler.set_knobs(tuned)
        log.line(as_line(slots_knobs_record("a", tuned, 1.0)))
        host.run(60.0)
    assert replay(path).count == 0
    lines = path.read_text().splitlines(keepends=True)
    for gone in ('"set_knobs"', '"who":"slots","instance":"a","now_s":1.0,"knobs"'):
        path.write_text("".join(line for line in lines if gone not in line))
        assert replay(path).count > 0, "without it the answers are others"


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


def taken_over(asked: Router | RecordingRouter) -> list[object]:
    """What the router answers when it follows an earlier one, loses a submission, and may not reserve."""
    asked.observe(snapshot("a", {"m": model()}), 1.0)
    asked.adopt("a", [Lease(key(), "a", 900, 0.5, 9.0)], [key()], 1.0)
    placed = routed(asked.place(call(1, reusable=900), 2.0))
    asked.submit_failed(call(1, reusable=900), placed, 2.1)
    again = asked.place(call(1, reusable=900), 2.2)
    return [placed, again, asked.completed(call(1, reusable=900), "a", Usage(1000, 900, 100), 3.0, False)]


def test_a_take_over_and_a_failed_submission_replay_without_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    arguments = {"instances": {"a": Capabilities()}, "knobs": replace(Knobs(), tau_s=5.0)}
    with DecisionLog(path) as log:
        log.header(scenario="", config="", seed=0, router="full", router_arguments=arguments, slots_arguments={})
        answers = taken_over(RecordingRouter(fresh(), log, lambda: 3.5))
    assert answers == taken_over(fresh())
    found = replay(path)
    assert (found.count, found.decisions) == (0, 8)


def test_a_withdrawn_call_replays_without_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    arguments = {"instances": {"a": Capabilities()}, "knobs": replace(Knobs(), tau_s=5.0)}
    with DecisionLog(path) as log:
        log.header(scenario="", config="", seed=0, router="full", router_arguments=arguments, slots_arguments={})
        asked = RecordingRouter(fresh(), log, lambda: 3.5)
        asked.observe(snapshot("a", {"m": model()}, healthy=False), 1.0)
        assert asked.place(call(1), 2.0).call_id == 1 and asked.withdraw(call(1), 2.5)
        asked.observe(snapshot("a", {"m": model()}, 2, 3.0), 3.0)
        assert asked.poll(3.0) == []
    found = replay(path)
    assert (found.count, found.decisions) == (0, 6)
