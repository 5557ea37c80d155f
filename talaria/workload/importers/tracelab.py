"""TraceLab's round traces: one sanitised model call of Claude Code or Codex per line, with timed events and tools.

Mapping: a row is a call, rows of one ``session_id`` its session. Prompt = ``input_tokens_total``. It begins with the
last input event (a prompt, a tool's result) and ends with the last event of the model. ``prefix_tokens`` is what the
server read from its cache: it bounds reuse after a rewrite; a prompt that grew is taken to continue the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import IsoTime, Name, Record, Tokens, json_records

INPUT_EVENTS = ("user_message", "tool_result")
USAGE_EVENT = "usage_report"


class _Event(Record):
    event_type: str
    timestamp: IsoTime


class _Round(Record):
    session_id: Name
    model: Name
    input_tokens_total: Tokens
    prefix_tokens: Tokens | None = None
    output_tokens: Tokens
    timing_events: list[_Event] = Field(min_length=1)


def detects(first: Any) -> bool:
    return isinstance(first, dict) and {"session_id", "input_tokens_total", "timing_events"} <= first.keys()


def load(path: Path, report: ImportReport) -> Imported:
    sessions: dict[str, list[RecordedCall]] = {}
    for where, value in json_records(path):
        row = parse(_Round, value, where)
        sessions.setdefault(row.session_id, []).append(_call(row, report))
    return Imported(assemble_all(sessions, report), times=True, estimated=("reuse_tokens",))


def _call(row: _Round, report: ImportReport) -> RecordedCall:
    inputs_s = [event.timestamp for event in row.timing_events if event.event_type in INPUT_EVENTS]
    outputs_s = [event.timestamp for event in row.timing_events if event.event_type not in (*INPUT_EVENTS, USAGE_EVENT)]
    if not inputs_s:
        report.note("calls without a recorded start: they begin with the model's first event")
    start_s = max(inputs_s) if inputs_s else min(event.timestamp for event in row.timing_events)
    end_s = max(start_s, *outputs_s) if outputs_s else start_s
    return RecordedCall(
        row.model, row.input_tokens_total, row.output_tokens, start_s=start_s, end_s=end_s, cached_tokens=row.prefix_tokens
    )
