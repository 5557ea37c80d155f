"""Whatever an agent tries, an engine is never sent a request that would kill it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.engine.errors import Busy
from talaria.gpu.engine.guard import TAGS, Guard, Hold, IllegalStep

STEPS = [("pause", ""), ("flush", ""), ("release", ""), ("go_on", ""), *(("resume", tag) for tag in TAGS)]


class Server:
    """SGLang as it was seen: a release while busy or a second one, and a resume without a release, end it."""

    def __init__(self) -> None:
        self.paused = False
        self.released: set[str] = set()
        self.calls = 0

    def take(self, step: str, tag: str) -> None:
        if step == "pause":
            self.paused = True
        elif step == "go_on":
            assert not self.released, "calls would run on memory that is not there"
            self.paused = False
        elif step == "flush":
            if self.calls:
                raise Busy
        elif step == "release":
            assert self.paused and not self.calls and not self.released
            self.released = set(TAGS)
        else:
            self.released.remove(tag)


def attempt(guard: Guard, server: Server, step: str, tag: str, *, breaks: bool = False) -> bool:
    """Whether the request was sent and answered well."""
    try:
        with guard.step(step, tag):
            server.take(step, tag)
            if breaks:
                raise ConnectionResetError
    except (Busy, IllegalStep, ConnectionResetError):
        return False
    return True


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.booleans()), max_size=60))
def test_no_sequence_of_steps_kills_the_server(steps: list[tuple[tuple[str, str], int, bool]]) -> None:
    """A call can arrive or end before any step; the server's own assertions are the property."""
    guard, server = Guard(), Server()
    for (step, tag), calls, idles in steps:
        if guard.hold is Hold.RUNNING or idles:  # a paused engine takes no calls
            server.calls = calls if guard.hold is Hold.RUNNING else 0
        attempt(guard, server, step, tag)
        assert (guard.hold is Hold.RUNNING) == (not server.paused)
        assert (guard.hold is Hold.RELEASED) == bool(server.released)


@given(st.lists(st.sampled_from(STEPS), max_size=10), st.sampled_from(STEPS), st.lists(st.sampled_from(STEPS), max_size=10))
def test_after_a_broken_step_nothing_is_sent(
    before: list[tuple[str, str]], broken: tuple[str, str], after: list[tuple[str, str]]
) -> None:
    guard, server = Guard(), Server()
    for step in before:
        attempt(guard, server, *step)
    legal = not attempt(guard, server, *broken, breaks=True) and guard.hold is Hold.BROKEN
    assert not legal or not any(attempt(guard, server, *step) for step in after)


def test_a_whole_turn_is_legal_and_can_be_repeated() -> None:
    guard, server = Guard(), Server()
    for _ in range(3):
        turn = [("pause", ""), ("flush", ""), ("release", ""), *(("resume", tag) for tag in TAGS), ("go_on", "")]
        assert all(attempt(guard, server, *step) for step in turn)
    assert guard.hold is Hold.RUNNING


def test_a_busy_engine_goes_on() -> None:
    guard, server = Guard(), Server()
    assert attempt(guard, server, "pause", "")
    server.calls = 1
    assert not attempt(guard, server, "flush", "")
    assert not attempt(guard, server, "release", "")
    assert attempt(guard, server, "go_on", "")


def test_two_requests_at_a_time_are_refused() -> None:
    guard = Guard()
    with guard.step("pause"), pytest.raises(IllegalStep, match="under way"), guard.step("flush"):
        raise AssertionError("sent")
