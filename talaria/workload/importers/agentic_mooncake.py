"""Agentic Mooncake rows (AIPerf, Dynamo): Mooncake's fields plus session ids, delays and dependencies.

Mapping: one row is one call; rows of one ``session_id`` are turns of one agent in file order, rows without one stand
alone. ``delay`` plus ``tool_wait_ms`` (ms) is the client's own time after the calls that a row waits for: those named
in ``wait_for``, else the agent's previous one. Agents that wait for each other are one session, whose first one is the
main line. ``timestamp`` (ms) is an arrival: it dates the session, and a turn known by it alone counts from the
previous arrival, an upper bound. ``input_length`` is the whole prompt, ``hash_ids`` (optional) its 512-token
prefix blocks with a partial last one, which is dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from talaria.errors import InputError
from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, UNNAMED_MODEL, RecordedCall, assemble, in_start_order
from talaria.workload.importers.mooncake import BLOCK_TOKENS
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import BlockHash, Milliseconds, Name, Record, Tokens, json_records


class _Row(Record):
    request_id: Name | None = None
    session_id: Name | None = None
    model: Name | None = None
    timestamp: Milliseconds | None = Field(None, validation_alias=AliasChoices("timestamp", "created_time"))
    delay: Milliseconds | None = Field(None, validation_alias=AliasChoices("delay", "delay_ms"))
    tool_wait_ms: Milliseconds | None = None
    wait_for: list[Name] = Field(default_factory=list)
    input_length: Tokens = Field(validation_alias=AliasChoices("input_length", "input_tokens"))
    output_length: Tokens = Field(validation_alias=AliasChoices("output_length", "output_tokens"))
    hash_ids: list[BlockHash] | None = None


def detects(first: Any) -> bool:
    keys = first.keys() if isinstance(first, dict) else set()
    return {"input_length", "output_length"} <= keys and bool({"session_id", "request_id", "wait_for"} & keys)


def load(path: Path, report: ImportReport) -> Imported:
    sessions = _sessions(path)
    zero_ms = min(rows[0][1].timestamp or 0.0 for rows in sessions.values())
    block_tokens = BLOCK_TOKENS if any(row.hash_ids for rows in sessions.values() for _, row in rows) else 0
    built = [
        assemble(
            name, _calls(name, rows, report), report, start_s=max(0.0, (rows[0][1].timestamp or 0.0) - zero_ms) / 1000.0,
            block_tokens=block_tokens,
        )
        for name, rows in sessions.items()
    ]  # fmt: skip
    scope = "global" if block_tokens else "session"
    return Imported(in_start_order(built), block_tokens, scope, times=True, estimated=("reuse_tokens",))


def _sessions(path: Path) -> dict[str, list[tuple[str, _Row]]]:
    """Rows with the agent of each, by session: agents joined by ``wait_for`` belong together."""
    rows: list[tuple[str, _Row]] = []
    agent_of: dict[str, str] = {}
    leader: dict[str, str] = {}
    seen: dict[str, int] = {}
    for number, (where, value) in enumerate(json_records(path)):
        row = parse(_Row, value, where)
        agent = row.session_id or row.request_id or f"request-{number}"
        leader.setdefault(agent, agent)
        seen.setdefault(agent, number)
        for other in row.wait_for:
            if other not in agent_of:
                raise InputError(f"wait_for = {other!r}", where=where, allowed="request ids of earlier rows")
            ends = _leader(leader, agent_of[other]), _leader(leader, agent)
            leader[max(ends, key=seen.__getitem__)] = min(ends, key=seen.__getitem__)
        if row.request_id is not None:
            if row.request_id in agent_of:
                raise InputError(f"request_id = {row.request_id!r} appears twice", where=where, allowed="unique request ids")
            agent_of[row.request_id] = agent
        rows.append((agent, row))
    sessions: dict[str, list[tuple[str, _Row]]] = {}
    for agent, row in rows:
        sessions.setdefault(_leader(leader, agent), []).append((agent, row))
    return sessions


def _leader(leader: dict[str, str], agent: str) -> str:
    while leader[agent] != agent:
        leader[agent] = agent = leader[leader[agent]]
    return agent


def _calls(session: str, rows: list[tuple[str, _Row]], report: ImportReport) -> list[RecordedCall]:
    calls: list[RecordedCall] = []
    start_ms = rows[0][1].timestamp or 0.0
    arrivals_ms: dict[str, float] = {}
    agent_of: dict[str, str] = {}
    for name, row in rows:
        agent = MAIN if name == session else name
        gap_ms = (row.delay or 0.0) + (row.tool_wait_ms or 0.0)
        if row.timestamp is not None:
            if row.delay is None and row.tool_wait_ms is None and not row.wait_for:
                gap_ms = max(0.0, row.timestamp - arrivals_ms.get(agent, start_ms))
                report.note("gaps taken between arrivals: they contain the model's time", int(agent in arrivals_ms), estimates="gap_s")
            arrivals_ms[agent] = row.timestamp
        spawner = agent_of[row.wait_for[0]] if row.wait_for else agent
        calls.append(
            RecordedCall(
                row.model or UNNAMED_MODEL, row.input_length, row.output_length, agent, spawner if spawner != agent else None,
                gap_s=gap_ms / 1000.0, blocks=tuple((row.hash_ids or [])[: row.input_length // BLOCK_TOKENS]),
                key=row.request_id or "", after=tuple(dict.fromkeys(row.wait_for)) or None,
            )
        )  # fmt: skip
        if row.request_id is not None:
            agent_of[row.request_id] = agent
    return calls
