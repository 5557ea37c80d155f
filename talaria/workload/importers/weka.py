"""Weka's Claude Code traces (kv-cache-tester): one object per trace, whole sessions with 64-token block hashes.

Mapping: ``requests`` in order are the main agent's calls: ``t`` (s from the trace's start) to ``t + api_time``, ``in``
and ``out`` tokens, ``hash_ids`` the full blocks of the prompt. An entry of type ``subagent`` is a line of its own on
its own model: its ``t`` is when its result came *back*, ``duration_ms`` earlier it began, and its inner requests count
from there. The parent's next call waits for it, so that the parent's gap holds no model time of the subagent.
Main times are whole seconds. A missing ``api_time`` is estimated from the trace's seconds per output token, and the
response is taken to be kept when every full block of the earlier prompt is. Traces have no common clock.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from talaria.errors import InputError
from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, RecordedCall, assemble
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import BlockHash, Milliseconds, Name, PositiveTokens, Record, Seconds, Tokens, json_records
from talaria.workload.session import Session

CLOCK_RESOLUTION_S = 1.0


class _Request(Record):
    type: Literal["n", "s"]
    t: Seconds
    model: Name
    in_: Tokens = Field(alias="in")
    out: Tokens
    hash_ids: list[BlockHash] = Field(default_factory=list)
    api_time: Seconds | None = None


class _Subagent(Record):
    type: Literal["subagent"]
    t: Seconds
    agent_id: Name
    duration_ms: Milliseconds
    requests: list[_Request] = Field(min_length=1)


class _Trace(Record):
    id: Name
    block_size: PositiveTokens
    hash_id_scope: Literal["local", "global"] = "local"
    requests: list[Annotated[_Request | _Subagent, Field(discriminator="type")]] = Field(min_length=1)


def detects(first: Any) -> bool:
    return isinstance(first, dict) and {"id", "block_size", "requests"} <= first.keys()


def load(path: Path, report: ImportReport) -> Imported:
    traces = ((parse(_Trace, value, where), where) for where, value in json_records(path))
    first, where = next(traces)
    kind = first.block_size, first.hash_id_scope
    sessions = (_session(trace, kind, where, report) for trace, where in chain([(first, where)], traces))
    scope = "global" if first.hash_id_scope == "global" else "session"
    return Imported(sessions, first.block_size, scope, estimated=("gap_s", "reuse_tokens"))


def _session(trace: _Trace, kind: tuple[int, str], where: str, report: ImportReport) -> Session:
    if (trace.block_size, trace.hash_id_scope) != kind:
        found = f"block_size, hash_id_scope = {trace.block_size}, {trace.hash_id_scope}"
        raise InputError(found, where=where, allowed=f"{kind[0]}, {kind[1]} as in the file's first trace")
    calls = _calls(trace, [entry for entry in trace.requests if isinstance(entry, _Request)], 0.0, report)
    for entry in trace.requests:
        if isinstance(entry, _Subagent):
            began_s = max(0.0, entry.t - entry.duration_ms / 1000.0)
            inner = _calls(trace, entry.requests, began_s, report)
            calls += [replace(call, agent=entry.agent_id, parent=MAIN, joined_s=entry.t) for call in inner]
    return assemble(trace.id, calls, report, block_tokens=trace.block_size, clock_resolution_s=CLOCK_RESOLUTION_S)


def _calls(trace: _Trace, requests: list[_Request], began_s: float, report: ImportReport) -> list[RecordedCall]:
    """The calls of one agent, whose times count from ``began_s``."""
    s_per_token = _s_per_output_token(requests)
    calls = []
    for request, following in zip_longest(requests, requests[1:]):
        end_s = request.t + (request.api_time or 0.0)
        if request.api_time is None:
            report.note("calls without a recorded duration: estimated from their output tokens")
            end_s = request.t + s_per_token * request.out
            if following is not None:
                end_s = max(request.t, min(end_s, following.t))
        blocks = tuple(request.hash_ids[: request.in_ // trace.block_size])
        calls.append(
            RecordedCall(request.model, request.in_, request.out, start_s=began_s + request.t, end_s=began_s + end_s, blocks=blocks)
        )
    return calls


def _s_per_output_token(requests: list[_Request]) -> float:
    timed = [(request.api_time, request.out) for request in requests if request.api_time is not None]
    tokens = sum(out for _, out in timed)
    return sum(api_time_s for api_time_s, _ in timed) / tokens if tokens else 0.0
