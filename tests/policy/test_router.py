"""Algorithm 1 and its rivals: gates, freshness, health, misprediction, ties, and replay (SPEC §3.2, §3.5)."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.router import ROUTERS, Overloaded, Routed, Router
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, Residency
from tests.policy.clusters import GIB, call, finish, key, model, routed, router, snapshot


def idle(name: str, **changes: object) -> InstanceSnapshot:
    return snapshot(name, {"m": model()}, **changes)


def busy(name: str, wait_s: float = 1.0, load_s: float = 1.0, **changes: object) -> InstanceSnapshot:
    return snapshot(name, {"m": model(queued=1, queued_work_s=wait_s)}, round_load_s=load_s, **changes)


# --- full -----------------------------------------------------------------------------------------------------------


def test_a_call_goes_to_the_candidate_of_least_cost() -> None:
    assert routed(router(busy("a", 3.0), busy("b", 1.0), busy("c", 2.0)).place(call(1), 0.0)).instance == "b"


def test_equal_costs_go_to_the_first_instance() -> None:
    assert routed(router(*(idle(f"i{n}") for n in range(9))).place(call(1), 0.0)).instance == "i0"


def test_an_instance_whose_round_would_pass_the_bound_is_no_candidate() -> None:
    # bound = 0.9 x 10 s; the call adds about 0.2 s
    made = router(busy("cheap", 0.1, load_s=8.95), busy("dear", 4.0, load_s=4.0), overload="shed")
    assert routed(made.place(call(1), 0.0)).instance == "dear"


def test_the_switch_counts_in_the_round_only_if_the_round_does_not_visit_the_model_anyway() -> None:
    other = model(queued=1)
    for queued, placed in ((0, False), (1, True)):
        models = {"m": model(Residency.PARKED, queued=queued), "n": other}
        made = router(snapshot("a", models, round_load_s=8.0), overload="shed")
        assert isinstance(made.place(call(1), 0.0), Overloaded) is not placed


def test_a_call_that_fits_no_round_still_gets_its_own_on_an_idle_instance() -> None:
    assert routed(router(idle("a"), overload="shed").place(call(1, prompt=190_000), 0.0)).reason == "cost"


def test_an_instance_is_not_idle_while_a_forwarded_call_is_on_its_way() -> None:
    made = router(idle("a"), overload="shed")
    made.place(call(1, prompt=190_000), 0.0)
    assert isinstance(made.place(call(2, key("other"), prompt=190_000), 0.0), Overloaded)


def test_a_hot_instance_has_no_round_to_overfill() -> None:
    made = router(busy("a", load_s=100.0, capabilities=Capabilities(hot=True)), overload="shed")
    assert routed(made.place(call(1), 0.0)).instance == "a"


def test_a_hot_instance_takes_only_the_model_that_it_pins() -> None:
    hot = snapshot("hot", {"m": model(), "n": model(Residency.ABSENT)}, capabilities=Capabilities(hot=True))
    cold = snapshot("cold", {"n": model(Residency.PARKED, queued_work_s=50.0)})
    assert routed(router(hot, cold).place(call(1, key(model_name="n")), 0.0)).instance == "cold"


def test_prompt_and_expected_output_must_fit_the_free_kv() -> None:
    small = snapshot("small", {"m": model(free_kv_tokens=1099)})
    large = snapshot("large", {"m": model(free_kv_tokens=1100, queued=1, queued_work_s=1.0)})
    assert routed(router(small, large, overload="shed").place(call(1), 0.0)).instance == "large"


def test_forwarded_calls_take_their_kv_before_any_snapshot_shows_it() -> None:
    made = router(snapshot("a", {"m": model(free_kv_tokens=1500)}), overload="shed")
    made.place(call(1), 0.0)
    assert isinstance(made.place(call(2, key("other")), 0.0), Overloaded)


def test_a_model_whose_weights_exceed_the_memory_is_not_opened() -> None:
    made = router(snapshot("a", {"m": model(Residency.ABSENT, weight_bytes=200 * GIB)}), overload="spill")
    assert "no instance serves model 'm'" in str(made.place(call(1), 0.0))


# --- freshness, health, misprediction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ROUTERS))
def test_a_stale_instance_gets_no_new_placement(name: str) -> None:
    made = router(idle("old"), idle("new"), name=name)
    made.observe(idle("new", version=2, time_s=8.0), 8.0)
    assert {routed(made.place(call(n, key(f"s{n}")), 9.0)).instance for n in range(4)} == {"new"}


def test_staleness_goes_by_receive_time() -> None:
    made = router(idle("a"), overload="shed")
    made.observe(idle("a", version=2, time_s=0.0), 100.0)
    assert routed(made.place(call(1), 105.0)).instance == "a"
    assert isinstance(made.place(call(2), 105.001), Overloaded)


def test_an_answered_heartbeat_keeps_the_last_snapshot_fresh() -> None:
    made = router(idle("a"), overload="shed")
    made.heartbeat("a", True, 4.0)
    assert routed(made.place(call(1), 8.0)).instance == "a"


@pytest.mark.parametrize("name", list(ROUTERS))
def test_after_a_missed_heartbeat_only_fresh_telemetry_lets_new_placements_in(name: str) -> None:
    made = router(idle("a"), name=name, overload="shed")
    made.heartbeat("a", False, 1.0)
    assert isinstance(made.place(call(1), 1.0), Overloaded)
    made.heartbeat("a", True, 1.1)
    assert isinstance(made.place(call(2), 1.2), Overloaded)
    made.observe(idle("a", version=2, time_s=1.3), 1.3)
    assert routed(made.place(call(3), 1.4)).instance == "a"


def test_an_older_version_is_ignored() -> None:
    made = router(busy("a", 1.0, version=5), busy("b", 2.0))
    made.observe(busy("a", 9.0, version=4), 0.1)
    assert routed(made.place(call(1), 0.2)).instance == "a"


def test_what_an_older_version_has_seen_is_no_load_any_more_whatever_snapshot_comes_next() -> None:
    made = router(idle("a", version=5), busy("b", 0.1))
    made.place(call(1), 0.0)
    made.observe(idle("a", version=4, seen_seq=1), 0.1)
    made.observe(busy("b", 0.1, version=2), 0.1)
    assert routed(made.place(call(2, key("s2")), 0.2)).instance == "a"


def test_a_model_that_an_instance_no_longer_lists_is_not_placed_there() -> None:
    made = router(idle("a"), busy("b"))
    made.observe(snapshot("a", {"n": model()}, version=2), 0.1)
    assert routed(made.place(call(1), 0.2)).instance == "b"


def test_forwarded_calls_count_as_load_until_a_snapshot_has_seen_them() -> None:
    made = router(idle("a"), busy("b", 0.15))  # a forwarded call adds 0.12 s
    assert [routed(made.place(call(n, key(f"s{n}")), 0.0)).instance for n in range(3)] == ["a", "a", "b"]
    made.observe(idle("a", version=2, seen_seq=2), 0.1)
    assert routed(made.place(call(4, key("s4")), 0.1)).instance == "a"


def test_submissions_are_numbered_per_instance() -> None:
    made = router(idle("a"), idle("b"), name="round-robin")
    placed = [routed(made.place(call(n), 0.0)) for n in range(4)]
    assert [(item.instance, item.seq) for item in placed] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_failed_submission_leaves_no_load_behind() -> None:
    made = router(idle("a"), idle("b"))
    before = made.explain(call(9, key("new")), 0.0)
    lost = call(1)
    made.submit_failed(lost, routed(made.place(lost, 0.0)), 0.0)
    assert made.explain(call(9, key("new")), 0.0) == before


def test_rising_deadline_risk_moves_traffic_away_and_is_forgiven_in_time() -> None:
    made = router(busy("a", 1.0), busy("b", 1.2))
    assert routed(made.place(call(1), 0.0)).instance == "a"
    made.observe(busy("a", 1.0, version=2, time_s=1.0, seen_seq=1, deadline_risk=3), 1.0)
    assert routed(made.place(call(2, key("s2")), 1.0)).instance == "b"
    assert not [gate for gate in made.explain(call(9, key("new")), 1.0).candidates[0].gates if not gate.passed]
    late = 1.0 + 10 * made.knobs.control_window_s
    made.observe(busy("a", 1.0, version=3, time_s=late, seen_seq=1, deadline_risk=3), late)
    made.observe(busy("b", 1.2, version=2, time_s=late, seen_seq=1), late)
    assert routed(made.place(call(3, key("s3")), late)).instance == "a"


# --- the rivals -------------------------------------------------------------------------------------------------------


def test_least_pressure_looks_at_load_only() -> None:
    loaded = snapshot("a", {"m": model(in_flight=2)}, round_load_s=1.0)
    empty = snapshot("b", {"m": model(Residency.ABSENT)})
    placed = routed(router(loaded, empty, name="least-pressure").place(call(1), 0.0))
    assert (placed.instance, placed.reason, placed.opens, placed.avoidable) == ("b", "pressure", True, True)


def test_least_pressure_counts_what_it_has_just_forwarded() -> None:
    made = router(idle("a"), idle("b"), name="least-pressure")
    assert [routed(made.place(call(n), 0.0)).instance for n in range(4)] == ["a", "b", "a", "b"]


def test_a_sticky_session_stays_on_its_first_instance_while_that_is_healthy() -> None:
    made = router(idle("a"), idle("b"), name="session-sticky")
    assert routed(made.place(call(1, key("s1")), 0.0)).reason == "pressure"
    made.observe(busy("a", 100.0, 100.0, version=2), 1.0)
    assert [routed(made.place(call(n, key("s1", line=f"l{n}")), 2.0)).instance for n in (2, 3)] == ["a", "a"]
    assert routed(made.place(call(4, key("s2")), 2.0)).instance == "b"


def test_a_sticky_session_starts_where_eq_1_is_cheapest_when_asked() -> None:
    resident, absent = {"m": model(Residency.PARKED)}, {"m": model(Residency.ABSENT)}
    hosts = (snapshot("a", absent), snapshot("b", resident))
    assert routed(router(*hosts, name="session-sticky").place(call(1), 0.0)).instance == "a"
    made = router(*hosts, name="session-sticky", sticky_start="cost")
    started = routed(made.place(call(1), 0.0))
    assert (started.instance, started.reason) == ("b", "cost")
    assert routed(made.place(call(2), 0.0)).reason == "sticky"
    made.heartbeat("b", False, 1.0)
    moved = routed(made.place(call(3), 1.0))
    assert (moved.instance, moved.reason) == ("a", "health")


def test_a_sticky_session_moves_for_good_when_its_instance_is_down() -> None:
    made = router(idle("a"), idle("b"), name="session-sticky")
    made.place(call(1), 0.0)
    made.heartbeat("a", False, 1.0)
    moved = routed(made.place(call(2), 1.0))
    assert (moved.instance, moved.reason) == ("b", "health")
    made.observe(idle("a", version=2, time_s=2.0), 2.0)
    assert routed(made.place(call(3), 2.0)).instance == "b"


def test_a_sticky_session_that_left_a_down_instance_through_the_queue_does_not_go_back() -> None:
    made = router(idle("a"), idle("b"), name="session-sticky", overload="queue")
    made.place(call(1), 0.0)
    made.heartbeat("a", False, 1.0)
    made.heartbeat("b", False, 1.0)
    assert isinstance(made.place(call(2), 1.0), Overloaded)
    made.observe(idle("b", version=2, time_s=2.0), 2.0)
    assert [routed(item).instance for item in made.poll(2.0)] == ["b"]
    made.observe(idle("a", version=2, time_s=3.0), 3.0)
    assert routed(made.place(call(3), 3.0)).instance == "b"


def test_round_robin_takes_turns_among_the_instances_that_may_be_used() -> None:
    made = router(idle("a"), idle("b"), idle("c"), name="round-robin")
    made.heartbeat("b", False, 0.0)
    assert [routed(made.place(call(n), 0.0)).instance for n in range(4)] == ["a", "c", "a", "c"]


@pytest.mark.parametrize("name", ["least-pressure", "session-sticky", "round-robin"])
def test_only_full_grants_leases(name: str) -> None:
    made = router(idle("a"), name=name)
    finish(made, call(1), "a", 0.5)
    assert made.lease_counts.granted == 0


# --- replay -----------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[object, ...]]:
    """Inputs of a router in time order: placements, completions, failures, snapshots, heartbeats, polls."""
    steps: list[tuple[object, ...]] = []
    now_s = 0.0
    for number in range(draw(st.integers(1, 40))):
        now_s += draw(st.sampled_from([0.0, 0.1, 0.7]))
        kind = draw(st.sampled_from(["place", "place", "complete", "fail", "snapshot", "beat", "poll"]))
        session, name = f"s{draw(st.integers(0, 3))}", draw(st.sampled_from(["a", "b", "c"]))
        reusable = draw(st.sampled_from([0, 900]))
        asked = call(number, key(session, draw(st.sampled_from(["m", "n"])), tenant=draw(st.sampled_from("tu"))), reusable=reusable)
        steps.append((kind, asked, name, now_s, draw(st.booleans()), draw(st.sampled_from(Residency)), draw(st.integers(0, 60))))
    return steps


def run(made: Router, history: list[tuple[object, ...]], first_version: int = 2) -> list[object]:
    answers: list[object] = []
    for version, (kind, asked, name, now_s, flag, residency, load) in enumerate(history, first_version):
        if kind == "place":
            answers.append(made.place(asked, now_s))
        elif kind == "complete":
            finish(made, asked, name, now_s)
        elif kind == "fail":
            placed = made.place(asked, now_s)
            if not isinstance(placed, Overloaded):
                made.submit_failed(asked, placed, now_s)
        elif kind == "snapshot":
            models = {"m": model(residency, queued=load, queued_work_s=0.1 * load), "n": model(Residency.PARKED)}
            made.observe(snapshot(name, models, version, now_s, round_load_s=0.2 * load, deadline_risk=load // 20), now_s)
        elif kind == "beat":
            made.heartbeat(name, flag, now_s)
        else:
            answers.append(made.poll(now_s))
        answers.append((made.next_poll_s(), made.drain_lease_changes(), asdict(made.lease_counts)))
    return answers


def fresh(name: str, overload: str) -> Router:
    models = {"m": model(), "n": model(Residency.ABSENT)}
    return router(*(snapshot(i, models) for i in "abc"), name=name, overload=overload, queue_limit=3, queue_deadline_s=2.0, tau_s=0.5)


@given(st.sampled_from(list(ROUTERS)), st.sampled_from(["queue", "shed", "spill"]), histories())
def test_the_same_inputs_give_the_same_decisions(name: str, overload: str, history: list[tuple[object, ...]]) -> None:
    assert run(fresh(name, overload), history) == run(fresh(name, overload), history)


@given(st.sampled_from(list(ROUTERS)), histories())
def test_explain_names_the_placement_that_follows_and_changes_nothing(name: str, history: list[tuple[object, ...]]) -> None:
    asked, unasked = fresh(name, "spill"), fresh(name, "spill")
    for version, step in enumerate(history, 2):
        now_s = step[3]
        assert asked.poll(now_s) == unasked.poll(now_s)
        explained = asked.explain(step[1], now_s)
        (*answers, books), expected = run(asked, [step], version), run(unasked, [step], version)
        assert [*answers, books] == expected
        if step[0] == "place" and isinstance(answers[0], Routed):
            assert (explained.chosen, explained.reason) == (answers[0].instance, answers[0].reason)
        elif step[0] == "place":
            assert explained.chosen is None
