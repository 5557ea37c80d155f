"""SGLang's agentic benchmark traces: conversations of turns, each with its new messages and whole prompt length.

Mapping: a turn is a call; ``prompt_tokens`` is its prompt. Where ``output_tokens`` is missing, the response is what
the next prompt grew by, less its new messages (tokens estimated from characters); the last one is taken as the mean
of its conversation's others. The format has no times, so gaps are zero, and no model.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import TYPICAL_OUTPUT_TOKENS, UNNAMED_MODEL, RecordedCall, assemble, chars_of, tokens_of_chars
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import Record, Tokens, json_records


class _Message(Record):
    content: Any = ""


class _Turn(Record):
    messages: list[_Message]
    prompt_tokens: Tokens
    output_tokens: Tokens | None = None


class _Document(Record):
    conversations: list[list[_Turn]] = Field(min_length=1)


def detects(first: Any) -> bool:
    if not isinstance(first, dict) or not isinstance(first.get("conversations"), list):
        return False
    return bool(first["conversations"]) and isinstance(first["conversations"][0], list)


def load(path: Path, report: ImportReport) -> Imported:
    conversations = [turns for where, value in json_records(path) for turns in parse(_Document, value, where).conversations]
    sessions = []
    for number, turns in enumerate(conversations):
        if turns:
            outputs = _output_tokens(turns, report)
            calls = [RecordedCall(UNNAMED_MODEL, turn.prompt_tokens, tokens) for turn, tokens in zip(turns, outputs, strict=True)]
            sessions.append(assemble(f"conversation-{number}", calls, report))
        else:
            report.note("conversations without a turn skipped")
    return Imported(sessions, estimated=("output_tokens", "reuse_tokens", "gap_s"))


def _output_tokens(turns: list[_Turn], report: ImportReport) -> list[int]:
    outputs = []
    for turn, following in itertools.pairwise(turns):
        if turn.output_tokens is not None:
            outputs.append(turn.output_tokens)
            continue
        report.note("responses of unknown length estimated from the next prompt")
        new_tokens = sum(tokens_of_chars(chars_of(message.content)) for message in following.messages)
        outputs.append(max(1, following.prompt_tokens - turn.prompt_tokens - new_tokens))
    last = turns[-1].output_tokens
    if last is None:
        report.note("last responses of unknown length taken as their conversation's mean")
        last = round(sum(outputs) / len(outputs)) if outputs else TYPICAL_OUTPUT_TOKENS
    return [*outputs, last]
