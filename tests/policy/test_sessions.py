"""The session table: what it remembers, and that it forgets (SPEC §3.6)."""

from __future__ import annotations

from talaria.policy.sessions import MAX_HOLDERS, SessionTable, Usage
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
