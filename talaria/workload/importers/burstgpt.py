"""BurstGPT: a CSV of requests to ChatGPT and GPT-4 with their times, and in newer files session ids.

Mapping: a row is a call from ``Timestamp`` (s) to ``Timestamp + Elapsed time``; rows of one ``Session ID`` are a
session, a row without one is a session of its own. Without ``Elapsed time`` the gap contains the model's time. Failed
requests have no response tokens: they count as one. A prompt that grew is taken to continue the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import CsvRecord, Name, Seconds, Tokens, csv_records

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class _Row(CsvRecord):
    arrival_s: Seconds = Field(alias="Timestamp")
    session: Name | None = Field(None, alias="Session ID")
    elapsed_s: Seconds | None = Field(None, alias="Elapsed time")
    model: Name = Field(alias="Model")
    prompt_tokens: Tokens = Field(alias="Request tokens")
    output_tokens: Tokens = Field(alias="Response tokens")


def detects(first: Any) -> bool:
    return isinstance(first, str) and all(column in first.split(",") for column in COLUMNS)


def load(path: Path, report: ImportReport) -> Imported:
    sessions: dict[str, list[RecordedCall]] = {}
    for number, (where, fields) in enumerate(csv_records(path, COLUMNS)):
        row = parse(_Row, fields, where)
        if row.elapsed_s is None:
            report.note("calls without a recorded duration: their model time counts as the client's gap", estimates="gap_s")
        name = f"request-{number}" if row.session is None else f"session-{row.session}"
        end_s = row.arrival_s + (row.elapsed_s or 0.0)
        call = RecordedCall(row.model, row.prompt_tokens, row.output_tokens, start_s=row.arrival_s, end_s=end_s)
        sessions.setdefault(name, []).append(call)
    return Imported(assemble_all(sessions, report), times=True, estimated=("reuse_tokens",))
