"""Dynamo request traces (``dynamo.request.trace.v1``): one line per finished request, and lines of tool events.

Mapping: a ``request_end`` is a call from ``request_received_ms`` for ``total_time_ms``. Requests of one
``agent_context.session_id`` are a session, of one ``trajectory_id`` a line of it, spawned by ``parent_trajectory_id``;
a request without context is a session of its own. ``replay.input_sequence_hashes`` name prefixes everywhere; a partial last
block is dropped. Tool events lie within the gaps, which the requests' own times already give.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from talaria.errors import InputError
from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, RecordedCall, assemble_all, signed_hash
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import Milliseconds, Name, PositiveTokens, Record, Tokens, json_records

REQUEST_END = "request_end"
Hash = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class _Replay(Record):
    trace_block_size: PositiveTokens
    input_sequence_hashes: list[Hash]


class _Request(Record):
    model: Name
    input_tokens: Tokens
    output_tokens: Tokens
    cached_tokens: Tokens | None = None
    request_received_ms: Milliseconds
    total_time_ms: Milliseconds
    replay: _Replay | None = None


class _Context(Record):
    session_id: Name
    trajectory_id: Name | None = None
    parent_trajectory_id: Name | None = None


class _Line(Record):
    event_type: str


class _RequestEnd(_Line):
    agent_context: _Context | None = None
    request: _Request


def detects(first: Any) -> bool:
    return isinstance(first, dict) and str(first.get("schema", "")).startswith("dynamo.request.trace.")


def load(path: Path, report: ImportReport) -> Imported:
    sessions: dict[str, list[RecordedCall]] = {}
    block_tokens: int | None = None
    for number, (where, value) in enumerate(json_records(path)):
        if parse(_Line, value, where).event_type != REQUEST_END:
            report.note("events that are no request (tools, markers) skipped")
            continue
        line = parse(_RequestEnd, value, where)
        request = line.request
        if request.replay is not None:
            size = request.replay.trace_block_size
            if block_tokens not in (None, size):
                raise InputError(f"trace_block_size = {size}", where=where, allowed=f"{block_tokens}, as in the lines before")
            block_tokens = size
        name = line.agent_context.session_id if line.agent_context else f"request-{number}"
        sessions.setdefault(name, []).append(_call(request, line.agent_context))
    built = assemble_all(sessions, report, block_tokens=block_tokens or 0)
    return Imported(built, block_tokens or 0, "global" if block_tokens else "session", times=True, estimated=("reuse_tokens",))


def _call(request: _Request, context: _Context | None) -> RecordedCall:
    agent = (context.trajectory_id if context else None) or MAIN
    parent = context.parent_trajectory_id if context else None
    start_s = request.request_received_ms / 1000.0
    blocks: tuple[int, ...] = ()
    if request.replay is not None:
        hashes = request.replay.input_sequence_hashes[: request.input_tokens // request.replay.trace_block_size]
        blocks = tuple(signed_hash(value) for value in hashes)
    return RecordedCall(
        request.model, request.input_tokens, request.output_tokens, agent, None if parent == agent else parent, start_s=start_s,
        end_s=start_s + request.total_time_ms / 1000.0, cached_tokens=request.cached_tokens, blocks=blocks,
    )  # fmt: skip
