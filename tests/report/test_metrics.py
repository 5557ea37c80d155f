"""Each metric of the contract computes what its docstring says, on records small enough to check by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.report.measured import session_times
from talaria.report.metrics import METRICS, metrics, objective
from talaria.report.record import FLAG_WARMUP
from tests.report.synthetic import SMALL_METRICS, add_call, empty_record, small_record

CONTRACT = list(SMALL_METRICS)


def test_the_registry_holds_exactly_the_names_of_the_contract_in_its_order() -> None:
    assert list(METRICS) == CONTRACT


@pytest.mark.parametrize("name", CONTRACT)
def test_every_metric_has_its_value_worked_out_by_hand(name: str) -> None:
    assert metrics(small_record())[name] == pytest.approx(SMALL_METRICS[name])


@pytest.mark.parametrize("name", CONTRACT)
def test_every_metric_is_defined_in_its_own_docstring(name: str) -> None:
    assert len(METRICS[name].doc) > 20
    assert METRICS[name].unit == {"_s": "s", "ib": "GiB"}.get(name[-2:], "")


def test_a_metric_without_a_denominator_is_none_and_never_nan() -> None:
    values = metrics(empty_record())
    undefined = {name for name, value in values.items() if value is None}
    assert {"sct_p50_s", "ttft_p95_s", "switch_share", "path_d2d", "residency_hit", "unused_lease", "kv_host"} <= undefined
    assert all(value == 0.0 for value in values.values() if value is not None)


def test_a_session_that_lost_a_call_counts_as_infinite_in_objectives_only() -> None:
    record = small_record()
    assert objective(record, "sct_p50_s") == 23.0  # {11, 23, inf, inf}: rank 2
    assert objective(record, "sct_p95_s") == math.inf
    assert objective(record, "sct_mean_s") == math.inf
    assert objective(record, "ttft_p50_s") == metrics(record)["ttft_p50_s"]


def test_an_undefined_objective_takes_the_worst_value_of_its_direction() -> None:
    assert objective(empty_record(), "sct_p50_s") == math.inf
    assert objective(empty_record(), "residency_hit") == -math.inf


def test_a_child_is_part_of_its_parent_and_has_a_completion_time_of_its_own() -> None:
    times = session_times(small_record())
    assert times.sct_s[0] == 11.0
    assert times.sct_s[1] == 6.5
    assert sorted(times.completed) == [11.0, 23.0]


def test_a_grandchild_prolongs_every_ancestor() -> None:
    record = empty_record()
    for session, enqueued_s in ((0, 0.0), (1, 1.0), (2, 2.0)):
        add_call(record, session, 0, enqueued_s, 0.5, 1.0 + 4.0 * session)
    record.session_parents = {2: 1, 1: 0}
    assert list(session_times(record).sct_s) == [11.0, 10.0, 9.0]


def test_a_failure_in_a_child_leaves_its_parent_without_a_completion_time() -> None:
    record = small_record()
    add_call(record, 1, 1, 22.0, 0.0, 1.0, outcome="failed")
    assert session_times(record).sct_s[0] == math.inf
    assert metrics(record)["sessions_completed"] == 1.0


def test_a_session_that_began_in_the_warm_up_has_no_completion_time() -> None:
    record = small_record()
    add_call(record, 4, 1, 40.0, 1.0, 2.0)
    assert math.isnan(session_times(record).sct_s[4])
    assert metrics(record)["sessions_completed"] == 2.0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=30))
def test_warm_up_calls_change_no_metric_of_the_measured_calls(rows: list[tuple[float, float, float]]) -> None:
    plain, warmed = empty_record(), empty_record()
    add_call(warmed, len(rows), 0, -1.0, 50.0, 60.0, flags=FLAG_WARMUP, output_tokens=9, rounds_waited=9)
    for number, (enqueued_s, ttft_s, decode_s) in enumerate(rows):
        for record in (plain, warmed):
            add_call(record, number, 0, enqueued_s, ttft_s, ttft_s + decode_s, output_tokens=4)
    assert metrics(plain) == metrics(warmed)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 100)), min_size=1, max_size=40))
def test_percentiles_are_observations_and_ordered(rows: list[tuple[float, float]]) -> None:
    record = empty_record()
    for number, (enqueued_s, ttft_s) in enumerate(rows):
        add_call(record, number, 0, enqueued_s, ttft_s, ttft_s)
    values, seen = metrics(record), set(record.calls["ttft_s"].tolist())
    assert {values["ttft_p50_s"], values["ttft_p95_s"]} <= seen
    assert (values["ttft_p50_s"] or 0.0) <= (values["ttft_p95_s"] or 0.0)
