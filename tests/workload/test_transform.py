"""Workloads made from workloads: what changes, and that nothing else does."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.workload.generate import preset
from talaria.workload.session import Session, TraceCall, Workload
from talaria.workload.transform import (
    assign_models,
    cap_gaps,
    first_calls,
    first_sessions,
    map_models,
    only_models,
    scale_gaps,
    scale_rate,
    within,
)
from tests.workload.listed import Listed, chain

THREE_MODELS = Listed(chain("s0", 5, model="big"), chain("s1", 3, model="mid"), chain("s2", 1, model="small"))


def test_models_are_assigned_by_falling_number_of_calls_in_turn() -> None:
    assert assign_models(THREE_MODELS, ["X", "Y"]) == {"big": "X", "mid": "Y", "small": "X"}


def test_a_model_that_the_scenario_has_keeps_its_name_and_others_take_what_is_free() -> None:
    assert assign_models(THREE_MODELS, ["mid", "X"]) == {"big": "X", "mid": "mid", "small": "X"}
    assert assign_models(THREE_MODELS, ["mid"]) == {"big": "mid", "mid": "mid", "small": "mid"}


def test_given_assignments_hold_and_the_rest_is_assigned() -> None:
    assert assign_models(THREE_MODELS, ["X", "Y"], {"big": "Y"}) == {"big": "Y", "mid": "X", "small": "X"}


@pytest.mark.parametrize(
    ("given_map", "complaint"),
    [
        ({"bgi": "X"}, "--map bgi=X: unknown model of the trace 'bgi'; allowed: big, mid, small; did you mean 'big'?"),
        ({"big": "Z"}, "--map big=Z: unknown model of the scenario 'Z'; allowed: X, Y"),
    ],
)
def test_an_assignment_of_an_unknown_model_is_refused(given_map: dict[str, str], complaint: str) -> None:
    with pytest.raises(InputError) as error:
        assign_models(THREE_MODELS, ["X", "Y"], given_map)
    assert str(error.value).startswith(complaint)


def test_mapped_calls_differ_in_their_model_alone_and_models_are_counted_anew() -> None:
    mapped = map_models(THREE_MODELS, {"big": "X", "mid": "Y", "small": "Y"})
    assert list(mapped.sessions()) == [chain("s0", 5, model="X"), chain("s1", 3, model="Y"), chain("s2", 1, model="Y")]
    assert mapped.models() == ("X", "Y")


def test_an_identity_mapping_changes_nothing() -> None:
    assert map_models(THREE_MODELS, {"big": "big"}) is THREE_MODELS


def test_capped_gaps_are_cut_and_shorter_ones_stay() -> None:
    workload = Listed(chain("s0", 3, gap_s=25.0), chain("s1", 3, gap_s=2.0))
    assert list(cap_gaps(workload, 10.0).sessions()) == [chain("s0", 3, gap_s=10.0), chain("s1", 3, gap_s=2.0)]


def test_slower_tools_stretch_every_gap() -> None:
    assert list(scale_gaps(Listed(chain("s0", 3, gap_s=2.0)), 3.0).sessions()) == [chain("s0", 3, gap_s=6.0)]


def test_a_higher_rate_divides_the_starts_and_leaves_the_gaps() -> None:
    workload = Listed(chain("s0", 2, start_s=0.0), chain("s1", 2, start_s=30.0))
    assert list(scale_rate(workload, 1.5).sessions()) == [chain("s0", 2, start_s=0.0), chain("s1", 2, start_s=20.0)]


def test_a_window_keeps_the_sessions_that_start_in_it_and_counts_from_its_start() -> None:
    workload = Listed(*(chain(f"s{at}", 1, start_s=float(at)) for at in range(6)))
    assert list(within(workload, 2.0, 4.0).sessions()) == [chain("s2", 1, start_s=0.0), chain("s3", 1, start_s=1.0)]


def test_a_window_stops_reading_after_its_end() -> None:
    workload = Listed(*(chain(f"s{at}", 1, start_s=float(at)) for at in range(100)))
    assert len(list(within(workload, 0.0, 3.0).sessions())) == 3
    assert workload.drawn == 4


@pytest.mark.parametrize("change", [lambda w: scale_rate(w, 2.0), lambda w: within(w, 0.0, 5.0)])
def test_changes_of_start_times_refuse_a_trace_without_times(change: Callable[[Workload], Workload]) -> None:
    with pytest.raises(InputError, match="needs recorded start times, and session 's0' has none"):
        list(change(Listed(chain("s0", 1))).sessions())


def test_the_first_sessions_are_taken_without_reading_more() -> None:
    workload = Listed(*(chain(f"s{at}", 1) for at in range(10)))
    assert [session.id for session in first_sessions(workload, 3).sessions()] == ["s0", "s1", "s2"]
    assert workload.drawn == 3


@given(depths=st.lists(st.integers(1, 9), min_size=1, max_size=12), wanted=st.integers(1, 120))
def test_the_first_calls_are_exactly_as_many_as_asked_for_or_all(depths: list[int], wanted: int) -> None:
    sessions = [chain(f"s{at}", depth) for at, depth in enumerate(depths)]
    taken = list(first_calls(Listed(*sessions), wanted).sessions())
    assert sum(len(session.calls) for session in taken) == min(wanted, sum(depths))
    for whole, part in zip(sessions, taken, strict=False):
        assert part.calls == whole.calls[: len(part.calls)]


def main(model: str, turn: int, waits_for: tuple[int, ...], gap_s: float, reuse_of: int | None = None) -> TraceCall:
    return TraceCall("main", model, turn, 100 * (turn + 1), 10, gap_s, waits_for, None, reuse_of, 100 * turn)


# Call 0 spawns a helper (calls 1 and 2, which spawn a second one, call 3); call 4 waits for both helpers.
FAMILY = Session(
    "family",
    (
        main("big", 0, (), 0.0),
        TraceCall("helper", "small", 0, 50, 5, 0.5, (0,), spawned_by=0),
        TraceCall("helper", "small", 1, 60, 5, 0.25, (1,), reuse_of=1, reuse_tokens=55),
        TraceCall("second", "big", 0, 30, 5, 0.125, (1,), spawned_by=1, reuse_of=1, reuse_tokens=20),
        main("big", 1, (0, 2, 3), 1.0, reuse_of=0),
    ),
)


def test_calls_of_other_models_are_dropped_and_their_client_time_stays() -> None:
    (kept,) = only_models(Listed(FAMILY), ["big"]).sessions()
    first, second, last = kept.calls
    assert first == FAMILY.calls[0]
    # It waited 0.125 s after a call that came 0.5 s after the first one, whose model time is gone.
    assert (second.waits_for, second.gap_s, second.spawned_by) == ((0,), 0.625, 0)
    assert (second.reuse_of, second.reuse_tokens) == (None, 0)
    # Both helper calls are gone from its path: 1.0 + 0.25 + 0.5 s after the first, and also after the second line.
    assert (last.waits_for, last.gap_s) == ((0, 1), 1.75)
    assert (last.reuse_of, last.reuse_tokens) == (0, 100)


def test_a_line_whose_spawner_is_dropped_starts_by_itself() -> None:
    (kept,) = only_models(Listed(FAMILY), ["small"]).sessions()
    assert [(call.line, call.turn, call.waits_for, call.spawned_by) for call in kept.calls] == [
        ("helper", 0, (), None),
        ("helper", 1, (0,), None),
    ]
    assert [(call.reuse_of, call.reuse_tokens) for call in kept.calls] == [(None, 0), (0, 55)]


def test_sessions_that_keep_no_call_are_left_out() -> None:
    assert [session.id for session in only_models(THREE_MODELS, ["mid", "small"]).sessions()] == ["s1", "s2"]


def test_keeping_an_unknown_model_is_refused() -> None:
    with pytest.raises(InputError, match="unknown model of the trace 'bug'; allowed: big, mid, small; did you mean 'big'"):
        only_models(THREE_MODELS, ["bug"])


CHANGES: list[Callable[[Workload], Workload]] = [
    lambda w: map_models(w, {w.models()[0]: "X"}),
    lambda w: cap_gaps(w, 1.0),
    lambda w: scale_gaps(w, 2.0),
    lambda w: first_sessions(w, 7),
    lambda w: first_calls(w, 50),
    lambda w: only_models(w, w.models()[:2]),
]


@given(st.lists(st.sampled_from(CHANGES), max_size=4), st.integers(0, 50))
def test_any_composition_yields_calls_that_link_to_earlier_calls_only(changes: list[Callable[[Workload], Workload]], seed: int) -> None:
    workload: Workload = preset("quickstart", seed)
    for change in changes:
        workload = change(workload)
    for session in workload.sessions():
        assert session.shared_tokens == 11_500
        for index, call in enumerate(session.calls):
            assert all(other < index for other in call.waits_for)
            assert call.reuse_of is None or call.reuse_of < index
    assert list(workload.sessions()) == list(workload.sessions())


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_workload_can_be_sent_to_another_process(change: Callable[[Workload], Workload]) -> None:
    workload = change(preset("quickstart", 0))
    assert list(pickle.loads(pickle.dumps(workload)).sessions()) == list(workload.sessions())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda: cap_gaps(THREE_MODELS, 0.0), "gap_cap_s = 0.0; allowed: a number above 0"),
        (lambda: scale_gaps(THREE_MODELS, float("inf")), "gap_scale = inf"),
        (lambda: scale_rate(THREE_MODELS, -1.0), "rate_scale = -1.0"),
        (lambda: first_sessions(THREE_MODELS, 0), "first_sessions = 0; allowed: a whole number of at least 1"),
        (lambda: first_calls(THREE_MODELS, 2.5), "first_calls = 2.5"),  # type: ignore[arg-type]
        (lambda: within(THREE_MODELS, 5.0, 5.0), "window_s = [5.0, 5.0]; allowed: 0 <= start < end"),
    ],
)
def test_bad_amounts_are_refused(change: Callable[[], Workload], complaint: str) -> None:
    with pytest.raises(InputError) as error:
        change()
    assert str(error.value).startswith(complaint)
