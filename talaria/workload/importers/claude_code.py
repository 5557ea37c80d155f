"""Claude Code transcripts: JSON lines of messages, tool results and summaries, as kept under ``~/.claude/projects``.

Mapping: an assistant message is a call. The file has one line per content block of it, so lines are merged on
``message.id``, and the last usage wins. Prompt = input + cache creation + cache read tokens. A call begins when the
record that it answers (``parentUuid``: a prompt or a tool result) was written and ends with its last block; a gap is
the time between. Sidechains are lines of their session, one per ``agentId`` or per chain of parents. A resumed
session copies old messages into its file; a message counts once. No hashes: a prompt that grew is taken to continue
the last one and its response; of one that shrank (a compaction), only what the server read from its cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import IsoTime, Name, Record, Tokens, json_records

SYNTHETIC_MODEL = "<synthetic>"


class _Usage(Record):
    input_tokens: Tokens
    output_tokens: Tokens
    cache_creation_input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None


class _Message(Record):
    id: Name | None = None
    model: Name
    usage: _Usage


class _Line(Record):
    uuid: str | None = None
    parentUuid: str | None = None
    sessionId: Name | None = None
    agentId: Name | None = None
    isSidechain: bool | None = None
    timestamp: IsoTime | None = None
    message: Any = None


class _Block(_Line):
    """A line that holds a content block of a model's answer."""

    timestamp: IsoTime
    message: _Message


@dataclass(slots=True)
class _Answer:
    """One assistant message, merged from its lines."""

    session: str
    agent: str
    model: str
    start_s: float
    end_s: float
    usage: _Usage

    def call(self) -> RecordedCall:
        usage = self.usage
        cached = usage.cache_read_input_tokens or 0
        return RecordedCall(
            self.model, usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached, usage.output_tokens, self.agent,
            None if self.agent == MAIN else MAIN, start_s=self.start_s, end_s=self.end_s, cached_tokens=cached,
        )  # fmt: skip


@dataclass(slots=True)
class _Threads:
    """Times of records and the agent that each belongs to, by uuid."""

    written_s: dict[str, float] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    sidechains: int = 0

    def agent_of(self, line: _Line) -> str:
        if not line.isSidechain:
            agent = MAIN
        elif line.agentId is not None:
            agent = f"agent-{line.agentId}"
        else:
            agent = self.agents.get(line.parentUuid or "", MAIN)
            if agent == MAIN:  # the first record of a new sidechain
                self.sidechains += 1
                agent = f"sidechain-{self.sidechains}"
        if line.uuid is not None:
            self.agents[line.uuid] = agent
            if line.timestamp is not None:
                self.written_s[line.uuid] = line.timestamp
        return agent


def detects(first: Any) -> bool:
    return isinstance(first, dict) and "sessionId" in first and ("message" in first or "uuid" in first or first.get("type") == "summary")


def load(path: Path, report: ImportReport) -> Imported:
    sessions: dict[str, list[RecordedCall]] = {}
    for answer in _answers(path, report):
        sessions.setdefault(answer.session, []).append(answer.call())
    return Imported(assemble_all(sessions, report), times=True, estimated=("reuse_tokens",))


def _answers(path: Path, report: ImportReport) -> Iterable[_Answer]:
    answers: dict[str, _Answer] = {}
    threads = _Threads()
    for where, value in json_records(path):
        line = parse(_Line, value, where)
        agent = threads.agent_of(line)
        if not isinstance(line.message, dict) or line.message.get("role") != "assistant":
            report.note("records that are no model call (prompts, tool results, summaries) skipped")
            continue
        if line.message.get("usage") is None or line.message.get("model") in (None, SYNTHETIC_MODEL):
            report.note("assistant messages without a model's usage (client-made or failed) skipped")
            continue
        block = parse(_Block, value, where)
        key = block.message.id or block.uuid or where
        session = block.sessionId or path.name
        known = answers.get(key)
        if known is None:
            answers[key] = _first_block(block, session, agent, threads, report)
        elif known.session != session:
            report.note("messages copied from another session (resumed or forked) skipped")
        else:
            report.note("content blocks merged into the call of their message")
            known.end_s = max(known.end_s, block.timestamp)
            known.usage = block.message.usage
    return answers.values()


def _first_block(block: _Block, session: str, agent: str, threads: _Threads, report: ImportReport) -> _Answer:
    asked_s = threads.written_s.get(block.parentUuid or "")
    if asked_s is None:
        report.note("calls without a recorded start: their model time counts as the client's gap", estimates="gap_s")
        asked_s = block.timestamp
    message = block.message
    return _Answer(session, agent, message.model, min(asked_s, block.timestamp), block.timestamp, message.usage)
