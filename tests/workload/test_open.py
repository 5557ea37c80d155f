"""One way to name a workload: presets, trace files, and what to change in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria.errors import InputError
from talaria.workload.generate import preset
from talaria.workload.open import open_workload
from talaria.workload.trace import TraceHeader, write_trace
from tests.workload.listed import chain


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "two.jsonl.gz"
    write_trace(path, TraceHeader("two", times=True), [chain("s0", 3, start_s=0.0, gap_s=20.0), chain("s1", 2, start_s=60.0)])
    return path


def test_a_name_opens_a_preset_and_a_path_opens_a_trace(trace: Path) -> None:
    assert list(open_workload("quickstart", 3).sessions()) == list(preset("quickstart", 3).sessions())
    assert [session.id for session in open_workload(str(trace), 0).sessions()] == ["s0", "s1"]


def test_a_mapping_overrides_fields_of_the_recipe() -> None:
    opened = open_workload({"preset": "replay960", "sessions": 6, "calls_per_model": 20}, 3)
    assert list(opened.sessions()) == list(preset("replay960", 3, sessions=6, calls_per_model=20).sessions())


def test_a_mapping_changes_presets_and_traces_alike(trace: Path) -> None:
    (session,) = open_workload({"trace": str(trace), "first_sessions": 1, "gap_cap_s": 10}, 0).sessions()
    assert session == chain("s0", 3, start_s=0.0, gap_s=10.0)
    calls = [call for s in open_workload({"preset": "tau_sweep", "gap_cap_s": 10, "first_calls": 12}, 0).sessions() for call in s.calls]
    assert len(calls) == 12
    assert max(call.gap_s for call in calls) == 10.0


def test_gaps_are_scaled_before_they_are_capped(trace: Path) -> None:
    (first, _) = open_workload({"gap_cap_s": 15, "trace": str(trace), "gap_scale": 0.5}, 0).sessions()
    assert {call.gap_s for call in first.calls[1:]} == {10.0}


def test_a_window_and_a_rate_apply_to_recorded_times(trace: Path) -> None:
    assert [session.start_s for session in open_workload({"trace": str(trace), "rate_scale": 2, "window_s": [30, 90]}, 0).sessions()] == [
        15.0
    ]


def test_a_generated_workload_written_as_a_trace_reads_back_call_for_call(tmp_path: Path) -> None:
    drawn = preset("replay960", 5)
    path = tmp_path / "drawn.jsonl"
    write_trace(path, TraceHeader("drawn"), drawn.sessions())
    opened = open_workload(str(path), 0)
    assert [(session.id, session.calls) for session in opened.sessions()] == [(session.id, session.calls) for session in drawn.sessions()]
    assert opened.models() == drawn.models()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("quickstrat", "scenario.yaml: unknown workload preset or trace file 'quickstrat'"),
        ("missing/trace.jsonl", "missing/trace.jsonl"),
        ({}, "scenario.yaml: needs exactly one of 'preset' and 'trace'"),
        ({"preset": "corpus", "trace": "x"}, "scenario.yaml: needs exactly one of 'preset' and 'trace'"),
        ({"preset": "corpus", "gap_cap": 10}, "did you mean 'gap_cap_s'?"),
        ({"trace": "x.jsonl", "sessions": 10}, "did you mean 'first_sessions'?"),
        ({"preset": "corpus", "depth_cap": -1}, "scenario.yaml: depth_cap = -1; allowed: greater than or equal to 1"),
        ({"preset": "corpus", "gap_cap_s": "long"}, "gap_cap_s = 'long'; allowed: a number above 0"),
        ({"preset": "corpus", "first_calls": True}, "first_calls = True; allowed: a whole number of at least 1"),
        ({"preset": "corpus", "window_s": 5}, "window_s = 5; allowed: [start, end] in seconds"),
        ({"preset": "corpus", "only_models": "model"}, "only_models = 'model'; allowed: a list of model names"),
        ({"preset": "corpus", "only_models": ["mode"]}, "did you mean 'model'?"),
    ],
)
def test_a_source_that_names_nothing_is_refused_in_one_line(source, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        open_workload(source, 0, where="scenario.yaml")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
