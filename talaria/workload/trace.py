"""The trace format ``talaria.trace/1``: one header line, then one session per line, as JSON lines, plain or gzip.

    {"schema": "talaria.trace/1", "name": "demo", "models": {"m": 2}}
    {"session": "a", "calls": [{"model": "m", "prompt_tokens": 900, "output_tokens": 90},
                               {"model": "m", "turn": 1, "prompt_tokens": 1200, "output_tokens": 40, "gap_s": 0.4,
                                "waits_for": [0], "reuse_of": 0, "reuse_tokens": 990}]}

(on one line each). Fields mean what ``Session`` and ``TraceCall`` say, and those at their default are left out.
``TraceFile`` streams sessions from disk as a ``Workload``; ``write_trace`` writes one atomically, the same bytes for
the same sessions. Both check every line: its fields here, what lines and calls owe each other in ``TraceRules``.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from talaria.errors import InputError
from talaria.validation import parse, parse_json
from talaria.workload.reading import BlockHash, Name, PositiveTokens, Seconds, Tokens, text_lines
from talaria.workload.rules import TraceHeader, TraceRules, by_calls
from talaria.workload.session import Session, TraceCall

SCHEMA = "talaria.trace/1"

CallIndex = Annotated[int, Field(ge=0)]
Estimate = Literal["prompt_tokens", "output_tokens", "gap_s", "reuse_tokens"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _HeaderLine(_Strict):
    schema_: Literal["talaria.trace/1"] = Field(alias="schema")
    name: Name
    block_tokens: Tokens = 0
    block_scope: Literal["session", "global"] = "session"
    models: dict[Name, Annotated[int, Field(ge=1)]] = Field(min_length=1)
    source: str = ""
    times: bool = False
    estimated: tuple[Estimate, ...] = ()


class _CallLine(_Strict):
    line: Name = "main"
    model: Name
    turn: Annotated[int, Field(ge=0)] = 0
    prompt_tokens: PositiveTokens
    output_tokens: PositiveTokens
    gap_s: Seconds = 0.0
    waits_for: tuple[CallIndex, ...] = ()
    spawned_by: CallIndex | None = None
    reuse_of: CallIndex | None = None
    reuse_tokens: Tokens = 0
    blocks: tuple[BlockHash, ...] = ()


class _SessionLine(_Strict):
    session: Name
    tenant: Name = "default"
    start_s: Seconds | None = None
    shared_tokens: Tokens = 0
    calls: tuple[_CallLine, ...] = Field(min_length=1)


class TraceFile:
    """A trace on disk as a ``Workload``. The header is read at once, sessions when they are asked for.

    Raises InputError, with file and line, here for the header and while iterating for sessions.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        number, text = next(text_lines(self.path))
        where = f"{self.path}:{number}"
        if not text.lstrip().startswith("{") or '"schema"' not in text:
            raise InputError(
                "not a Talaria trace: the first line is no header", where=where, allowed=f'{{"schema": "{SCHEMA}", "name": ..., ...}}',
                fix="convert other formats with `talaria-sim trace import`",
            )  # fmt: skip
        line = parse_json(_HeaderLine, text, where)
        self.header = TraceHeader(
            line.name, line.block_tokens, line.block_scope, by_calls(line.models), line.source, line.times, line.estimated
        )
        self.name, self.block_tokens, self.block_scope = line.name, line.block_tokens, line.block_scope

    def models(self) -> tuple[str, ...]:
        return tuple(self.header.models)

    def sessions(self) -> Iterator[Session]:
        """Sessions in start order; checks every line, and at the end that the header's call counts were true."""
        lines = text_lines(self.path)
        next(lines)
        check = TraceRules(self.header)
        for number, text in lines:
            where = f"{self.path}:{number}"
            session = _session(parse_json(_SessionLine, text, where))
            check(session, where)
            yield session
        if check.calls != self.header.models:
            told, found = (json.dumps(by_calls(counts)) for counts in (self.header.models, check.calls))
            raise InputError(
                f"calls per model {found} differ from the header's {told}", where=str(self.path),
                fix="the file is cut short or was edited: write it again or correct the header's models",
            )  # fmt: skip


def write_trace(path: Path | str, header: TraceHeader, sessions: Iterable[Session]) -> TraceHeader:
    """Write a trace atomically, gzip if the name ends in ``.gz``; returns the header with calls per model counted.

    ``sessions`` is consumed once and must be in start order. Raises InputError if a session breaks a rule of the
    format or nothing can be written there; the file then stays as it was.
    """
    path = Path(path)
    compressed = path.suffix == ".gz"
    check = TraceRules(header)
    try:
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=path.parent) as folder:
            body_path, whole_path = Path(folder, "body"), Path(folder, "whole")
            with _writer(body_path, compressed) as body:
                for session in sessions:
                    fields, where = _session_fields(session), f"{header.source or header.name}: session {session.id!r}"
                    parse(_SessionLine, fields, where)
                    check(session, where)
                    body.write(_line(fields))
            if not check.calls:
                raise InputError("there are no sessions to write", where=str(path), fix="give a trace with at least one call")
            header = replace(header, models=by_calls(check.calls))
            with _writer(whole_path, compressed) as head:
                head.write(_line(_header_fields(header)))
            with whole_path.open("ab") as whole, body_path.open("rb") as rest:
                shutil.copyfileobj(rest, whole)  # for gzip: a second member of the same file
            os.replace(whole_path, path)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", where=str(path), fix="choose a writable place") from None
    return header


@contextmanager
def _writer(path: Path, compressed: bool) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with path.open("wb") as file:
        if compressed:
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                yield packed
        else:
            yield file


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _header_fields(header: TraceHeader) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "name": header.name, "block_tokens": header.block_tokens, "block_scope": header.block_scope,
        "models": header.models, "source": header.source, "times": header.times, "estimated": list(header.estimated),
    }  # fmt: skip


def _session_fields(session: Session) -> dict[str, Any]:
    fields: dict[str, Any] = {"session": session.id}
    if session.tenant != "default":
        fields["tenant"] = session.tenant
    if session.start_s is not None:
        fields["start_s"] = session.start_s
    if session.shared_tokens:
        fields["shared_tokens"] = session.shared_tokens
    fields["calls"] = tuple(_call_fields(call) for call in session.calls)
    return fields


def _call_fields(call: TraceCall) -> dict[str, Any]:
    values = {name: getattr(call, name) for name in _CallLine.model_fields}
    defaults = {name: info.default for name, info in _CallLine.model_fields.items()}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _session(line: _SessionLine) -> Session:
    calls = tuple(
        TraceCall(
            line=call.line, model=call.model, turn=call.turn, prompt_tokens=call.prompt_tokens, output_tokens=call.output_tokens,
            gap_s=call.gap_s, waits_for=call.waits_for, spawned_by=call.spawned_by, reuse_of=call.reuse_of,
            reuse_tokens=call.reuse_tokens, blocks=call.blocks,
        )
        for call in line.calls
    )  # fmt: skip
    return Session(line.session, calls, line.tenant, line.start_s, line.shared_tokens)
