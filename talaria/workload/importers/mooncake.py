"""Mooncake's FAST25 traces: arrivals with prefix hashes of 512-token blocks, and no session id.

Mapping: ``timestamp`` (ms) is the arrival, ``input_length`` and ``output_length`` are tokens, ``hash_ids`` cover the
prompt including a last partial block, which is dropped. A hash names its whole prefix, so a session is rebuilt as a
chain: a call continues the latest earlier call all of whose full blocks it begins with. One full block is not enough,
since every prompt of the service opens with the same one. Each call is continued once; a second continuation is a
branch, a line of its own. The trace has no response times: a gap is the time between arrivals, an upper bound of the
client's own time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, UNNAMED_MODEL, RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import BlockHash, Milliseconds, Record, Tokens, json_records

BLOCK_TOKENS = 512


class _Row(Record):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockHash]


def detects(first: Any) -> bool:
    keys = first.keys() if isinstance(first, dict) else set()
    return {"timestamp", "input_length", "hash_ids"} <= keys and not {"session_id", "chat_id"} & keys


def load(path: Path, report: ImportReport) -> Imported:
    rows = (parse(_Row, value, where) for where, value in json_records(path))
    sessions = assemble_all(_chains(rows), report, block_tokens=BLOCK_TOKENS)
    report.note("sessions of several calls rebuilt from prefix chains", sum(len(session.calls) > 1 for session in sessions))
    return Imported(sessions, BLOCK_TOKENS, "global", times=True, estimated=("gap_s", "reuse_tokens"))


def _chains(rows: Iterable[_Row]) -> dict[str, list[RecordedCall]]:
    sessions: dict[str, list[RecordedCall]] = {}
    tips: dict[int, tuple[str, str]] = {}
    """Last full block of a call to its session and agent: the place where a continuation attaches."""
    branches = 0
    continued: set[int] = set()
    for number, row in enumerate(sorted(rows, key=lambda row: row.timestamp)):
        blocks = tuple(row.hash_ids[: row.input_length // BLOCK_TOKENS])
        tip = next((block for block in reversed(blocks[1:]) if block in tips), None)
        parent = None
        if tip is None:
            session, agent = f"chain-{number}", MAIN
        else:
            session, agent = tips[tip]
            if tip in continued and tip != blocks[-1]:
                branches += 1
                parent, agent = agent, f"branch-{branches}"
            continued.add(tip)
        at_s = row.timestamp / 1000.0
        call = RecordedCall(UNNAMED_MODEL, row.input_length, row.output_length, agent, parent, start_s=at_s, end_s=at_s, blocks=blocks)
        sessions.setdefault(session, []).append(call)
        if len(blocks) > 1:
            tips[blocks[-1]] = session, agent
    return sessions
