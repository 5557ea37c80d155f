"""AIPerf's multi-turn datasets: one conversation per line, its turns with text, delay and output length.

Mapping: a turn is a call. Its prompt is all text so far plus all responses so far; tokens of text are estimated from
characters. ``delay`` (ms) is the client's own time since the previous response. ``output_length`` (or ``max_tokens``)
is the response; where a turn has none, the median response of agent sessions (SPEC §7) stands in and is counted.
A conversation's ``timestamp`` (ms) of the first turn is its start, if every conversation has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from talaria.validation import parse
from talaria.workload.importers.assemble import (
    UNNAMED_MODEL,
    RecordedCall,
    assemble,
    in_start_order,
    output_or_typical,
    tokens_of_chars,
)
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import Milliseconds, Name, Record, Tokens, json_records


class _Turn(Record):
    text: str | None = None
    texts: list[str] = Field(default_factory=list)
    model: Name | None = None
    delay: Milliseconds = 0.0
    timestamp: Milliseconds | None = None
    output_length: Tokens | None = Field(None, validation_alias=AliasChoices("output_length", "max_tokens"))


class _Conversation(Record):
    session_id: Name | None = None
    turns: list[_Turn] = Field(min_length=1)


def detects(first: Any) -> bool:
    if not isinstance(first, dict) or not isinstance(first.get("turns"), list):
        return False
    return any(isinstance(turn, dict) and ("text" in turn or "texts" in turn) for turn in first["turns"])


def load(path: Path, report: ImportReport) -> Imported:
    read = [(number, parse(_Conversation, value, where)) for number, (where, value) in enumerate(json_records(path))]
    starts_ms = [conversation.turns[0].timestamp for _, conversation in read]
    known_ms = [start_ms for start_ms in starts_ms if start_ms is not None]
    times = len(known_ms) == len(starts_ms)
    sessions = [
        assemble(
            conversation.session_id or f"conversation-{number}", _calls(conversation, report), report,
            start_s=((start_ms or 0.0) - min(known_ms)) / 1000.0 if times else None,
        )
        for (number, conversation), start_ms in zip(read, starts_ms, strict=True)
    ]  # fmt: skip
    return Imported(in_start_order(sessions), times=times, estimated=("prompt_tokens", "output_tokens", "reuse_tokens"))


def _calls(conversation: _Conversation, report: ImportReport) -> list[RecordedCall]:
    calls = []
    history_tokens = 0
    for turn in conversation.turns:
        prompt_tokens = history_tokens + tokens_of_chars(len(turn.text or "") + sum(len(text) for text in turn.texts))
        output_tokens = output_or_typical(turn.output_length, report)
        calls.append(RecordedCall(turn.model or UNNAMED_MODEL, prompt_tokens, output_tokens, gap_s=turn.delay / 1000.0))
        history_tokens = prompt_tokens + output_tokens
    return calls
