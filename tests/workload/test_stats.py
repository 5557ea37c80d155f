"""Percentiles by nearest rank, and the regime table of any workload."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.workload.session import Session, TraceCall
from talaria.workload.stats import nearest_rank, regime, render
from tests.workload.listed import Listed, chain


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 5), (90, 9), (90.1, 10), (95, 10), (100, 10)])
def test_a_percentile_is_the_observation_at_the_rank_rounded_up(percent: float, expected: float) -> None:
    assert nearest_rank(list(range(1, 11)), percent) == expected


@given(size=st.integers(1, 3000), tenths=st.integers(1, 1000))
def test_rounding_errors_never_move_the_rank(size: int, tenths: int) -> None:
    exact = -(-Fraction(tenths, 10) * size // 100)
    assert nearest_rank(range(1, size + 1), tenths / 10) == exact


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0.001, 100.0))
def test_a_percentile_is_an_observation_with_at_least_that_share_at_or_below(values: list[float], percent: float) -> None:
    found = nearest_rank(sorted(values), percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent * len(values) / 100 - 1e-6


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_a_percentile_of_nothing_or_outside_the_scale_is_an_error(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        nearest_rank(values, percent)


def test_the_regime_counts_sessions_lines_calls_and_models() -> None:
    helper = TraceCall("helper", "small", 0, 50, 5, gap_s=0.5, waits_for=(0,), spawned_by=0)
    parent = chain("s1", 3, model="big", start_s=40.0)
    table = regime(Listed(chain("s0", 2, model="mid", start_s=10.0), Session("s1", (*parent.calls, helper), start_s=40.0)))
    assert (table["sessions"], table["lines"], table["calls"]) == (2, 3, 6)
    assert table["models"] == {"big": 3, "mid": 2, "small": 1}
    assert table["depth"] == {"p50": 2, "p95": 4, "max": 4}
    assert table["gap_s"] == {"n": 4, "p50": 1.0, "p95": 1.0, "max": 1.0}
    assert table["start_span_s"] == 30.0


def test_reuse_counts_continuations_that_share_more_than_half_of_the_previous_prompt_and_response() -> None:
    def call(turn: int, reuse_tokens: int) -> TraceCall:
        return TraceCall("main", "a", turn, 500, 100, 0.1, (turn - 1,) if turn else (), None, turn - 1 if turn else None, reuse_tokens)

    # Half of 500 + 100 is 300: one of the four continuations is above it.
    table = regime(Listed(Session("s", (call(0, 0), call(1, 300), call(2, 301), call(3, 0), call(4, 299)))))
    assert (table["continuations"], table["reusing_over_half"]) == (4, 0.25)


def test_gaps_of_exactly_ten_seconds_count_as_long() -> None:
    table = regime(Listed(chain("s0", 3, gap_s=10.0), chain("s1", 3, gap_s=9.999)))
    assert table["gaps_from_10_s"] == 0.5


def test_what_was_not_observed_is_none() -> None:
    table = regime(Listed(chain("s0", 1)))
    assert table["gap_s"] == {"n": 0, "p50": None, "p95": None, "max": None}
    assert (table["gaps_from_10_s"], table["reusing_over_half"], table["start_span_s"]) == (None, None, None)


def test_the_rendered_table_shows_the_published_regime_beside_ours() -> None:
    rows = {line.rsplit(None, 2)[0]: line.split()[-2:] for line in render(regime(Listed(chain("s0", 4), chain("s1", 2)))).splitlines()}
    assert rows["quantity"] == ["here", "published"]
    assert rows["calls"] == ["6", "7,386"]
    assert rows["gap_s p95"] == ["1.000", "1.320"]
    assert rows["depth max"] == ["4", "187"]
    assert rows["start_span_s"] == ["-", "-"]
