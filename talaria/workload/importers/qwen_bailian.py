"""Qwen's Bailian traces: requests with the chat that they continue and hashes of 16-token blocks.

Mapping: a request whose ``parent_chat_id`` is in the trace continues that chat's session, after it; a second child of
one parent is a branch, a line of its own. ``timestamp`` (s) is the arrival: a gap is the time between arrivals, an upper bound
of the client's own time. ``hash_ids`` name prefixes everywhere; a partial last block is dropped. One model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from talaria.errors import InputError
from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, UNNAMED_MODEL, RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import BlockHash, Record, Seconds, Tokens, json_records

BLOCK_TOKENS = 16
NO_PARENT = -1


class _Row(Record):
    chat_id: int
    parent_chat_id: int
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockHash]


def detects(first: Any) -> bool:
    return isinstance(first, dict) and {"chat_id", "parent_chat_id", "hash_ids"} <= first.keys()


def load(path: Path, report: ImportReport) -> Imported:
    rows: dict[int, _Row] = {}
    for where, value in json_records(path):
        row = parse(_Row, value, where)
        if row.chat_id in rows:
            raise InputError(f"chat_id = {row.chat_id} appears twice", where=where, allowed="unique chat ids")
        rows[row.chat_id] = row
    sessions = _sessions(sorted(rows.values(), key=lambda row: row.timestamp), report)
    built = assemble_all(sessions, report, block_tokens=BLOCK_TOKENS)
    return Imported(built, BLOCK_TOKENS, "global", times=True, estimated=("gap_s", "reuse_tokens"))


def _sessions(rows: list[_Row], report: ImportReport) -> dict[str, list[RecordedCall]]:
    sessions: dict[str, list[RecordedCall]] = {}
    places: dict[int, tuple[str, str]] = {}
    continued: set[int] = set()
    for row in rows:
        session, agent, parent = f"chat-{row.chat_id}", MAIN, None
        after: tuple[str, ...] = ()
        if row.parent_chat_id in places:
            session, agent = places[row.parent_chat_id]
            after = (str(row.parent_chat_id),)
            if row.parent_chat_id in continued:
                agent, parent = f"branch-{row.chat_id}", agent
            continued.add(row.parent_chat_id)
        elif row.parent_chat_id != NO_PARENT:
            report.note("requests whose parent is not in the trace begin a session")
        places[row.chat_id] = session, agent
        sessions.setdefault(session, []).append(
            RecordedCall(
                UNNAMED_MODEL, row.input_length, row.output_length, agent, parent, start_s=row.timestamp, end_s=row.timestamp,
                blocks=tuple(row.hash_ids[: row.input_length // BLOCK_TOKENS]), key=str(row.chat_id), after=after,
            )
        )  # fmt: skip
    return sessions
