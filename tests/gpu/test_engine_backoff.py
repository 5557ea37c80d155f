"""Engines that fail are started again at once, then ever later; calls are refused while one does not start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.engine.backoff import Backoff, BackoffPolicy

POLICY = BackoffPolicy(first_s=1.0, cap_s=10.0, attempts=2)


def test_waits_double_up_to_the_cap() -> None:
    backoff, waits = Backoff(POLICY), []
    for _ in range(7):
        backoff.failed("no memory", 100.0)
        waits.append(backoff.until_s - 100.0)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_an_engine_that_has_lived_long_is_started_again_at_once() -> None:
    backoff = Backoff(POLICY)
    backoff.failed("a crash", 0.0)
    backoff.started(0.0)
    backoff.failed("a crash soon after", 9.0)
    assert backoff.until_s == 10.0
    backoff.started(10.0)
    backoff.failed("a crash much later", 20.0)
    assert backoff.until_s == 20.0


@given(st.lists(st.booleans(), max_size=12))
def test_calls_are_refused_once_starts_fail_in_a_row(starts: list[bool]) -> None:
    backoff, failed_in_a_row, now_s = Backoff(POLICY), 0, 0.0
    for succeeds in starts:
        now_s = max(now_s, backoff.until_s)
        if succeeds:
            failed_in_a_row = 0
            backoff.started(now_s)
            backoff.failed("it died", now_s)
        else:
            failed_in_a_row += 1
            backoff.failed("it does not start", now_s)
        refusal = backoff.refusal(now_s)
        assert (refusal is not None) == (failed_in_a_row >= POLICY.attempts)
        assert refusal is None or "it does not start" in refusal
