"""How sessions get started: every kind is lazy, seeded and never goes back in time."""

from __future__ import annotations

import math
import statistics
from itertools import count, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.workload.arrivals import SHUFFLE_WINDOW, AllAtOnce, ClosedPool, FromTrace, Poisson, Staggered, parse
from talaria.workload.generate import preset
from talaria.workload.session import Session
from tests.workload.listed import chain


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def named(how_many: int) -> list[Session]:
    return [chain(f"s{number}", 1, start_s=float(number)) for number in range(how_many)]


def test_a_closed_pool_starts_every_session_once_in_an_order_that_the_seed_fixes() -> None:
    sessions = named(40)
    orders = [[session.id for _, session in ClosedPool(5).schedule(sessions, rng(seed))] for seed in (0, 0, 1)]
    assert sorted(orders[0]) == sorted(session.id for session in sessions)
    assert orders[0] == orders[1] != orders[2]


def test_a_closed_pool_interleaves_models_and_issues() -> None:
    # In the order of the workload the first three sessions are always issue 0 on each model; mixed, they are any three of
    # thirty: the chance that all are of one issue is 2/29 · 1/28.
    together = 0
    for seed in range(40):
        first = [session.id[:5] for _, session in islice(ClosedPool(3).schedule(preset("replay960", 0).sessions(), rng(seed)), 3)]
        together += len(set(first)) == 1
    assert together <= 2


def test_a_closed_pool_bounds_the_live_sessions_and_others_do_not() -> None:
    assert ClosedPool(7).pool == 7
    assert [arrivals.pool for arrivals in (Staggered(), Poisson(), AllAtOnce(), FromTrace())] == [None] * 4


def test_a_closed_pool_looks_a_bounded_number_of_sessions_ahead() -> None:
    asked = 0

    def endless():
        nonlocal asked
        for number in count():
            asked += 1
            yield chain(f"s{number}", 1)

    list(islice(ClosedPool(5).schedule(endless(), rng()), 100))
    assert asked <= SHUFFLE_WINDOW + 100


def test_staggered_by_as_many_sessions_as_models_starts_issue_by_issue() -> None:
    starts: dict[str, set[float]] = {}
    for start_s, session in Staggered(interval_s=20.0, group=3).schedule(preset("replay960", 0).sessions(), rng()):
        starts.setdefault(session.id.split("-")[0], set()).add(start_s)
    assert starts == {f"i{issue:04d}": {20.0 * issue} for issue in range(10)}


def test_poisson_starts_have_exponential_gaps_of_the_given_rate() -> None:
    times = list(islice(Poisson(rate_per_s=4.0).start_times(rng()), 5000))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    # An exponential's mean and standard deviation are both 1/rate; the mean of n has a standard error of 1/(rate·sqrt(n)),
    # the standard deviation one of about sqrt(2)/(rate·sqrt(n)).
    assert abs(statistics.fmean(gaps) - 0.25) < 4 * 0.25 / math.sqrt(5000)
    assert abs(statistics.stdev(gaps) - 0.25) < 4 * 0.25 * math.sqrt(2 / 5000)


def test_all_at_once_starts_everything_at_zero() -> None:
    assert [start_s for start_s, _ in AllAtOnce().schedule(named(4), rng())] == [0.0] * 4


def test_trace_arrivals_use_the_recorded_times() -> None:
    assert [(start_s, session.id) for start_s, session in FromTrace().schedule(named(3), rng())] == [(0.0, "s0"), (1.0, "s1"), (2.0, "s2")]


def test_trace_arrivals_refuse_a_trace_without_times() -> None:
    with pytest.raises(InputError, match=r"session 's9': .* none; choose another kind, e\.g\. closed_pool:5"):
        list(FromTrace().schedule([chain("s9", 1)], rng()))


@given(
    arrivals=st.one_of(
        st.builds(ClosedPool, st.integers(1, 9)),
        st.builds(Staggered, st.floats(0.001, 1e4), st.integers(1, 9)),
        st.builds(Poisson, st.floats(1e-3, 1e3)),
        st.just(AllAtOnce()),
        st.just(FromTrace()),
    ),
    sessions=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_every_kind_starts_each_session_once_and_starts_never_fall(arrivals, sessions: int, seed: int) -> None:
    started = list(arrivals.schedule(named(sessions), rng(seed)))
    assert sorted(session.id for _, session in started) == sorted(session.id for session in named(sessions))
    times = [start_s for start_s, _ in started]
    assert times == sorted(times)
    assert started == list(arrivals.schedule(named(sessions), rng(seed)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("closed_pool", ClosedPool(5)),
        ("closed_pool:8", ClosedPool(8)),
        ("staggered:20", Staggered(20.0, 1)),
        ("staggered:20:3", Staggered(20.0, 3)),
        ("poisson:0.5", Poisson(0.5)),
        ("all_at_once", AllAtOnce()),
        ("trace", FromTrace()),
        ({"kind": "closed_pool", "sessions": 3}, ClosedPool(3)),
        ({"kind": "staggered", "group": 3}, Staggered(30.0, 3)),
    ],
)
def test_arrivals_are_read_from_text_and_from_mappings(source, expected) -> None:
    assert parse(source) == expected


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("closed-pool:5", "did you mean 'closed_pool'?"),
        ("closed_pool:0", "sessions = '0'; allowed: a whole number of at least 1"),
        ("closed_pool:2.5", "sessions = '2.5'; allowed: a whole number of at least 1"),
        ("poisson:-1", "rate_per_s = '-1'; allowed: a number above 0"),
        ("poisson:nan", "rate_per_s = 'nan'; allowed: a number above 0"),
        ("poisson:fast", "rate_per_s = 'fast'"),
        ("all_at_once:3", "'all_at_once:3' has 1 values; allowed: all_at_once"),
        ({"sessions": 3}, "unknown kind of arrivals ''"),
        ({"kind": "poisson", "rate": 3}, "did you mean 'rate_per_s'?"),
    ],
)
def test_bad_arrivals_are_refused_in_one_line(source, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        parse(source, where="--arrivals")
    assert complaint in str(error.value)
    assert str(error.value).startswith("--arrivals")
    assert "\n" not in str(error.value)
