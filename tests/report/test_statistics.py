"""Means, intervals and paired differences over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from talaria.report.metrics import METRICS, metrics
from talaria.report.statistics import SeedResult, estimate, over_seeds, paired, sct_by_session, sessions_improved, t_quantile
from tests.report.synthetic import add_call, small_record

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


def test_the_interval_is_students_t_on_the_seeds() -> None:
    # 2, 4, 6: mean 4, std 2, half width 4.302653·2/√3 = 4.968275
    result = estimate([2.0, 4.0, 6.0])
    assert (result.mean, result.std) == (4.0, 2.0)
    assert (result.low, result.high) == pytest.approx((4 - 4.968275, 4 + 4.968275), abs=1e-5)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706205), (2, 4.302653), (9, 2.262157), (29, 2.045230)])
def test_quantiles_agree_with_the_printed_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-6)


def test_quantiles_that_are_kept_are_those_that_are_computed() -> None:
    for degrees in range(1, 40):
        assert t_quantile(degrees) == pytest.approx(stdtrit(degrees, 0.975), rel=1e-13)


def test_one_seed_has_a_mean_and_no_interval() -> None:
    result = estimate([3.0])
    assert (result.mean, result.std, result.low, result.high) == (3.0, None, None, None)


def test_undefined_seeds_are_left_out_of_the_mean() -> None:
    assert estimate([None, 1.0, None, 3.0]).mean == 2.0
    assert estimate([None, None]).mean is None


@given(VALUES)
def test_the_interval_holds_its_mean_and_the_mean_lies_within_the_values(values: list[float]) -> None:
    result = estimate(values)
    assert result.mean is not None and result.low is not None and result.high is not None
    assert result.low <= result.mean <= result.high
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert min(values) - slack <= result.mean <= max(values) + slack


@given(VALUES, st.floats(-1e3, 1e3))
def test_a_shift_that_every_seed_shares_leaves_the_paired_interval_narrow(values: list[float], shift: float) -> None:
    scts = np.array([1.0])
    low = [SeedResult(dict.fromkeys(METRICS, value), scts) for value in values]
    high = [SeedResult(dict.fromkeys(METRICS, value + shift), scts) for value in values]
    result = paired({"a": high, "b": low})[0].estimate
    assert result.mean == pytest.approx(shift, abs=1e-6)
    assert (result.low, result.high) == pytest.approx((shift, shift), abs=1e-6)


def test_pairs_are_compared_a_minus_b_for_every_two_configurations() -> None:
    scts = np.array([1.0])
    configs = {name: [SeedResult(dict.fromkeys(METRICS, value), scts)] for name, value in (("x", 5.0), ("y", 3.0), ("z", 10.0))}
    differences = [(entry.a, entry.b, entry.estimate.mean) for entry in paired(configs) if entry.metric == "sct_p50_s"]
    assert differences == [("x", "y", 2.0), ("x", "z", -5.0), ("y", "z", -7.0)]


def test_seeds_that_only_one_side_finished_are_not_compared() -> None:
    scts = np.array([1.0])
    one, two = SeedResult(dict.fromkeys(METRICS, 1.0), scts), SeedResult(dict.fromkeys(METRICS, 9.0), scts)
    assert paired({"a": [one, two], "b": [one]})[0].estimate.mean == 0.0


def test_a_session_improves_if_it_ends_sooner_or_only_there() -> None:
    a = np.array([10.0, 20.0, 5.0, 7.0, np.nan, np.inf])
    b = np.array([11.0, 19.0, np.inf, 7.0, 9.0, 4.0])
    assert sessions_improved(a, b) == 2
    assert sessions_improved(b, a) == 2


def test_children_are_not_counted_among_improved_sessions() -> None:
    faster, slower = small_record(), small_record()
    add_call(slower, 1, 1, 22.0, 1.0, 3.0)  # the child and with it session 0 end at 25 s instead of 21 s
    assert sessions_improved(sct_by_session(faster), sct_by_session(slower)) == 1


def test_every_metric_gets_an_estimate_over_seeds() -> None:
    estimates = over_seeds([metrics(small_record()), metrics(small_record())])
    assert list(estimates) == list(METRICS)
    assert all(math.isclose(entry.std or 0.0, 0.0) for entry in estimates.values())
