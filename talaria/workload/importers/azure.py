"""Azure's LLM inference traces of 2023: a CSV of arrivals with prompt and output tokens, single requests.

Mapping: a row is a session of one call that starts at ``TIMESTAMP``. There are no sessions, models or prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import UNNAMED_MODEL, RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import CsvRecord, IsoTime, Tokens, csv_records

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Row(CsvRecord):
    arrival_s: IsoTime = Field(alias="TIMESTAMP")
    prompt_tokens: Tokens = Field(alias="ContextTokens")
    output_tokens: Tokens = Field(alias="GeneratedTokens")


def detects(first: Any) -> bool:
    return isinstance(first, str) and all(column in first.split(",") for column in COLUMNS)


def load(path: Path, report: ImportReport) -> Imported:
    sessions = {}
    for number, (where, fields) in enumerate(csv_records(path, COLUMNS)):
        row = parse(_Row, fields, where)
        sessions[f"request-{number}"] = [RecordedCall(UNNAMED_MODEL, row.prompt_tokens, row.output_tokens, start_s=row.arrival_s)]
    return Imported(assemble_all(sessions, report), times=True)
