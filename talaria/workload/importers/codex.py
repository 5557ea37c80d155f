"""Codex CLI rollouts: one session per file, as JSON lines of ``{timestamp, type, payload}``.

Mapping: every ``token_count`` event with a ``last_token_usage`` is a call; a report whose totals did not move repeats
the last one and is merged. Input tokens include the cached ones, output tokens the reasoning. A call begins with the
last thing that the client sent (a prompt, a tool's output) before the model's first item and ends with the model's last
item. The model is that of the latest ``turn_context``. No hashes: as for Claude Code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria.validation import parse
from talaria.workload.importers.assemble import UNNAMED_MODEL, RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import IsoTime, Name, Record, Tokens, json_records

MODEL_ITEMS = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")
CLIENT_ITEMS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class _Usage(Record):
    input_tokens: Tokens
    output_tokens: Tokens
    cached_input_tokens: Tokens | None = None


class _Total(Record):
    total_tokens: Tokens | None = None


class _Info(Record):
    model: Name | None = None
    last_token_usage: _Usage | None = None
    total_token_usage: _Total | None = None


class _Meta(Record):
    id: Name | None = None


class _Context(Record):
    model: Name | None = None


class _TokenCount(Record):
    info: _Info | None = None


class _Line(Record):
    timestamp: IsoTime
    type: str
    payload: dict[str, Any]


def detects(first: Any) -> bool:
    return isinstance(first, dict) and {"timestamp", "type", "payload"} <= first.keys()


def load(path: Path, report: ImportReport) -> Imported:
    rollout = _Rollout(report)
    for where, value in json_records(path):
        rollout.read(parse(_Line, value, where), where)
    session = rollout.session or path.name
    return Imported(assemble_all({session: rollout.calls} if rollout.calls else {}, report), times=True, estimated=("reuse_tokens",))


@dataclass(slots=True, init=False)
class _Rollout:
    """What is known while the lines go by: the model, and the times of the call in progress."""

    report: ImportReport
    calls: list[RecordedCall]
    session: str | None
    model: str
    sent_s: float | None
    began_s: float | None
    ended_s: float | None
    total_tokens: int | None

    def __init__(self, report: ImportReport) -> None:
        self.report, self.calls, self.session, self.model = report, [], None, UNNAMED_MODEL
        self.sent_s = self.began_s = self.ended_s = None
        self.total_tokens = None

    def read(self, line: _Line, where: str) -> None:
        kind, role = line.payload.get("type"), line.payload.get("role")
        if line.type == "session_meta":
            self.session = self.session or parse(_Meta, line.payload, where).id
        elif line.type == "turn_context":
            self.model = parse(_Context, line.payload, where).model or self.model
        elif line.type == "event_msg" and kind == "token_count":
            self._usage(line.timestamp, parse(_TokenCount, line.payload, where).info)
        elif kind in MODEL_ITEMS or (kind == "message" and role == "assistant"):
            self.began_s = self.began_s if self.began_s is not None else line.timestamp
            self.ended_s = line.timestamp
        elif kind in (*CLIENT_ITEMS, "user_message", "message"):
            if self.began_s is None:
                self.sent_s = line.timestamp
        else:
            self.report.note("records that are no part of a call (settings, progress) skipped")

    def _usage(self, at_s: float, info: _Info | None) -> None:
        if info is None or info.last_token_usage is None:
            self.report.note("token counts without a call's usage skipped")
            return
        total = info.total_token_usage.total_tokens if info.total_token_usage else None
        if total is not None and total == self.total_tokens:
            self.report.note("repeated token counts merged")
            return
        self.total_tokens = total
        usage = info.last_token_usage
        end_s = self.ended_s if self.ended_s is not None else at_s
        start_s = self.sent_s if self.sent_s is not None else self.began_s
        if start_s is None:
            self.report.note("calls without a recorded start: their model time counts as the client's gap", estimates="gap_s")
            start_s = end_s
        model = info.model or self.model
        self.calls.append(
            RecordedCall(model, usage.input_tokens, usage.output_tokens, start_s=min(start_s, end_s), end_s=end_s,
                         cached_tokens=usage.cached_input_tokens)
        )  # fmt: skip
        self.sent_s = self.began_s = self.ended_s = None
