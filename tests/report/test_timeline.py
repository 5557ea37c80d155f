"""The timeline is a valid Chrome trace in which every lane nests and nothing of the record is lost."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from talaria.report.record import RunRecord
from talaria.report.timeline import SESSIONS_PID, trace_events, write_timeline
from tests.report.synthetic import add_call, empty_record, plausible_record, small_record


def slices(record: RunRecord) -> list[dict[str, Any]]:
    return [event for event in trace_events(record) if event["ph"] == "X"]


def lane_names(record: RunRecord) -> list[str]:
    return [event["args"]["name"] for event in trace_events(record) if event["name"] == "thread_name"]


def test_the_file_is_json_with_every_event_of_the_record(tmp_path: Path) -> None:
    record = small_record()
    write_timeline(record, tmp_path / "timeline.json")
    written = json.loads((tmp_path / "timeline.json").read_text())
    assert written["traceEvents"] == list(trace_events(record))
    assert written["otherData"] == {"scenario": "by-hand", "config": "talaria", "seed": 0}


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_timeline(plausible_record(seed=3), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_instance_has_lanes_for_rounds_switches_slots_phases_and_staging() -> None:
    assert lane_names(small_record())[:10] == ["rounds", "switches", "slots", "phases", "staging"] * 2


def test_a_completed_call_is_queued_then_prefilled_then_decoded() -> None:
    sessions = [event for event in slices(small_record()) if event["pid"] == SESSIONS_PID]
    call = next(event for event in sessions if event["args"] and event["ts"] == 10_000_000)
    parts = [event for event in sessions if event["tid"] == call["tid"] and not event["args"]]
    # Enqueued at 10 s, admitted after 1 s, first token after 2 s, last after 4 s.
    assert [(part["name"], part["ts"], part["dur"]) for part in parts[:3]] == [
        ("queued", 10_000_000, 1_000_000),
        ("prefill", 11_000_000, 1_000_000),
        ("decode", 12_000_000, 2_000_000),
    ]


def test_a_call_that_was_shed_shows_no_work() -> None:
    events = slices(small_record())
    shed = next(event for event in events if event["args"].get("outcome") == "shed")
    assert shed["dur"] == 0
    assert not any(event["args"] == {} and event["ts"] == shed["ts"] and event["tid"] == shed["tid"] for event in events)


@pytest.mark.parametrize("record", [small_record(), plausible_record()], ids=["small", "plausible"])
def test_slices_of_one_lane_nest_or_follow_each_other(record: RunRecord) -> None:
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in slices(record):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        open_until: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_overlapping_calls_of_one_line_lie_in_lanes_beside_each_other() -> None:
    record = empty_record()
    for enqueued_s in (0.0, 1.0, 6.0):
        add_call(record, 0, 0, enqueued_s, 1.0, 4.0)
    assert lane_names(record)[10:] == ["session 0", "session 0 (2)"]


def test_memory_is_a_counter_in_gib() -> None:
    samples = [event for event in trace_events(plausible_record()) if event["ph"] == "C"]
    assert samples[0]["args"]["weights"] == 58.0
