"""Agentic Mooncake rows (AIPerf, Dynamo): Mooncake's fields plus a session id and a delay per turn.

Mapping: one row is one call; rows of one ``session_id`` are its turns in file order. ``timestamp`` (ms) is the
session's start; ``delay`` (ms) is the client's own time since the previous response, which is our gap as it is. A
later turn with only a ``timestamp`` counts from the previous arrival, an upper bound. ``input_length`` is the whole
prompt, ``hash_ids`` (optional) its 512-token prefix blocks with a partial last one, which is dropped. Rows without
a session id are one-call sessions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from talaria.workload.importers.assemble import UNNAMED_MODEL, RecordedCall, assemble, in_start_order
from talaria.workload.importers.mooncake import BLOCK_TOKENS
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import BlockHash, Milliseconds, Name, Record, Tokens, json_records, parse


class _Row(Record):
    session_id: Name | None = None
    timestamp: Milliseconds | None = Field(None, validation_alias=AliasChoices("timestamp", "created_time"))
    delay: Milliseconds | None = Field(None, validation_alias=AliasChoices("delay", "delay_ms"))
    input_length: Tokens = Field(validation_alias=AliasChoices("input_length", "input_tokens"))
    output_length: Tokens = Field(validation_alias=AliasChoices("output_length", "output_tokens"))
    hash_ids: list[BlockHash] = Field(default_factory=list)


def detects(first: Any) -> bool:
    return isinstance(first, dict) and {"session_id", "input_length", "output_length"} <= first.keys()


def load(path: Path, report: ImportReport) -> Imported:
    sessions: dict[str, list[_Row]] = {}
    for number, (where, value) in enumerate(json_records(path)):
        row = parse(_Row, value, where)
        sessions.setdefault(row.session_id or f"request-{number}", []).append(row)
    block_tokens = BLOCK_TOKENS if any(row.hash_ids for rows in sessions.values() for row in rows) else 0
    zero_ms = min(rows[0].timestamp or 0.0 for rows in sessions.values())
    built = [
        assemble(name, _calls(rows, report), report, start_s=((rows[0].timestamp or 0.0) - zero_ms) / 1000.0, block_tokens=block_tokens)
        for name, rows in sessions.items()
    ]
    return Imported(in_start_order(built), block_tokens, "global" if block_tokens else "session", times=True, estimated=("reuse_tokens",))


def _calls(rows: list[_Row], report: ImportReport) -> list[RecordedCall]:
    calls: list[RecordedCall] = []
    arrival_ms = rows[0].timestamp
    for row in rows:
        gap_ms = row.delay or 0.0
        if row.delay is None and row.timestamp is not None and arrival_ms is not None and calls:
            report.note("gaps taken between arrivals: they contain the model's time", estimates="gap_s")
            gap_ms = max(0.0, row.timestamp - arrival_ms)
        arrival_ms = row.timestamp if row.timestamp is not None else arrival_ms
        blocks = tuple(row.hash_ids[: row.input_length // BLOCK_TOKENS])
        calls.append(RecordedCall(UNNAMED_MODEL, row.input_length, row.output_length, gap_s=gap_ms / 1000.0, blocks=blocks))
    return calls
