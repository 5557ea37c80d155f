"""vLLM's multi-turn benchmark conversations: a JSON list of chats with roles and texts.

Mapping: every assistant message is a call whose prompt is all messages before it. Tokens are estimated from
characters. The format has no times, so gaps are zero, and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import UNNAMED_MODEL, RecordedCall, assemble, chars_of, tokens_of_chars
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import Name, Record, json_records


class _Message(Record):
    role: str
    content: Any


class _Conversation(Record):
    id: Name | None = None
    messages: list[_Message] = Field(min_length=1)


def detects(first: Any) -> bool:
    return isinstance(first, dict) and "messages" in first and "turns" not in first and "sessionId" not in first


def load(path: Path, report: ImportReport) -> Imported:
    sessions = []
    for number, (where, value) in enumerate(json_records(path)):
        conversation = parse(_Conversation, value, where)
        calls = list(_calls(conversation))
        if calls:
            sessions.append(assemble(conversation.id or f"conversation-{number}", calls, report))
        else:
            report.note("conversations without an assistant message skipped")
    return Imported(sessions, estimated=("prompt_tokens", "output_tokens", "reuse_tokens", "gap_s"))


def _calls(conversation: _Conversation) -> Iterator[RecordedCall]:
    history_tokens = 0
    for message in conversation.messages:
        tokens = tokens_of_chars(chars_of(message.content))
        if message.role == "assistant":
            yield RecordedCall(UNNAMED_MODEL, history_tokens, tokens)
        history_tokens += tokens
