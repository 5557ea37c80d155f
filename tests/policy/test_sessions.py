"""The session table: what it remembers, and that it forgets (SPEC §3.6)."""

from __future__ import annotations

from talaria.policy.knobs import Knobs
from talaria.policy.router import ROUTERS
from talaria.policy.sessions import MAX_HOLDERS, UNKNOWN_MODEL_OUTPUT_TOKENS, SessionTable, Usage
from talaria.policy.snapshot import Capabilities
from tests.policy.clusters import call, finish, key, model, routed, router, snapshot


def test_a_completion_records_instance_and_kv_length_of_its_line() -> None:
    table = SessionTable(0.2)
    table.completed(key(), "a", Usage(1000, 0, 100), 3.0)
    line = table.line(key())
    assert line is not None
    assert (line.completed_on, line.completed_s, line.kv_tokens) == ("a", 3.0, 1100)
    assert table.line(key(line="other")) is None and table.line(key("other")) is None


def test_a_session_s_home_is_the_instance_of_its_first_call() -> None:
    table = SessionTable(0.2)
    assert table.home(key()) is None
    table.placed(key(), "a", 0.0)
    table.placed(key(line="sub"), "b", 1.0)
    assert table.home(key()) == "a"


def test_the_instances_that_may_hold_a_prefix_are_kept_newest_first_and_bounded() -> None:
    table = SessionTable(0.2)
    for name in "abcdefb":
        table.placed(key(), name, 0.0)
    line = table.line(key())
    assert line is not None and line.holders == ("b", "f", "e", "d") and len(line.holders) == MAX_HOLDERS


def test_the_least_recently_used_session_is_forgotten_beyond_the_limit() -> None:
    table = SessionTable(0.2, max_sessions=2)
    for name in ("old", "new", "old", "newest"):
        table.placed(key(name), "a", 0.0)
    assert [table.home(key(name)) for name in ("old", "new", "newest")] == ["a", None, "a"]


def test_a_session_that_has_been_idle_for_long_is_forgotten() -> None:
    table = SessionTable(0.2, idle_limit_s=10.0)
    table.placed(key("old"), "a", 0.0)
    table.placed(key("new"), "a", 10.001)
    assert len(table) == 1 and table.home(key("old")) is None


def test_the_router_forgets_an_ended_session() -> None:
    made = router(snapshot("a", {"m": model()}), snapshot("b", {"m": model()}), name="session-sticky")
    assert [routed(made.place(call(n), 0.0)).instance for n in (1, 2)] == ["a", "a"]
    made.session_ended("t", "s")
    assert routed(made.place(call(3), 0.0)).instance == "b"


def test_books_are_bounded_by_live_sessions() -> None:
    made = router(snapshot("a", {"m": model()}), stale_after_s=1e9)
    for number in range(300):
        asked = call(number, key(f"s{number}"))
        made.place(asked, float(number))
        finish(made, asked, "a", number + 0.5)
        made.session_ended("t", f"s{number}")
        made.observe(snapshot("a", {"m": model()}, number + 2, number + 0.5, seen_seq=number + 1), number + 0.5)
    made.poll(1e6)
    kept = (made._sessions, made._leases, made._queue, made._consumed, made._overlay._entries)
    assert [len(book) for book in kept] == [0, 0, 0, 0, 0]


def test_outputs_are_expected_by_the_call_itself_else_by_its_model_s_average_from_the_prior_on() -> None:
    table = SessionTable(0.2, {"m": 200.0})
    asked = call(1, expected_output_tokens=None)
    assert table.expected_output_tokens(call(1)) == 100.0
    assert table.expected_output_tokens(asked) == 200.0
    table.completed(key(), "a", Usage(1000, 0, 100), 1.0)
    assert table.expected_output_tokens(asked) == 200.0 + 0.2 * (100 - 200)


def test_a_model_without_a_prior_is_expected_to_go_on_as_it_began() -> None:
    table = SessionTable(0.2, {"m": 200.0})
    other = call(1, key(model_name="n"), expected_output_tokens=None)
    assert table.expected_output_tokens(other) == UNKNOWN_MODEL_OUTPUT_TOKENS
    table.completed(key(model_name="n"), "a", Usage(1000, 0, 100), 1.0)
    assert table.expected_output_tokens(other) == 100.0


def test_a_longer_prior_makes_a_call_of_unknown_length_dearer() -> None:
    costs = []
    for prior in (100.0, 300.0):
        made = ROUTERS["full"]({"a": Capabilities()}, Knobs(), output_tokens={"m": prior})
        made.observe(snapshot("a", {"m": model()}), 0.0)
        costs.append(routed(made.place(call(1, expected_output_tokens=None), 0.0)).request_s)
    assert costs[0] < costs[1]
