"""Importers of recorded traces: one module per format behind the registry ``FORMATS``.

A module has ``detects(first)``, which looks at a file's first record, and ``load(path, report)``, which turns the file
into sessions. ``import_trace`` finds the format, drops duplicates if asked to, and writes ``talaria.trace/1``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from talaria.errors import InputError, unknown_name
from talaria.workload.importers import (
    agentic_mooncake,
    aiperf_dag,
    aiperf_multi_turn,
    azure,
    burstgpt,
    claude_code,
    codex,
    dynamo,
    lmcache_agent,
    mooncake,
    otel_genai,
    qwen_bailian,
    sglang_agentic,
    swe_agent,
    talaria_trace,
    tracelab,
    vllm_multi_turn,
    weka,
)
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import json_records, text_lines
from talaria.workload.rules import TraceHeader
from talaria.workload.session import Session
from talaria.workload.trace import write_trace

LOOK_AHEAD = 50
"""Records that detection looks at: some formats open with lines that could be anybody's."""


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format. ``detects`` takes one decoded JSON record, or the first line of a file that is not JSON."""

    name: str
    detects: Callable[[Any], bool]
    load: Callable[[Path, ImportReport], Imported]

    @classmethod
    def of(cls, name: str, module: ModuleType) -> Format:
        return cls(name, module.detects, module.load)


FORMATS: dict[str, Format] = {
    name: Format.of(name, module)
    for name, module in (
        ("talaria", talaria_trace),
        ("weka", weka),
        ("mooncake", mooncake),
        ("agentic-mooncake", agentic_mooncake),
        ("aiperf-multi-turn", aiperf_multi_turn),
        ("aiperf-dag", aiperf_dag),
        ("claude-code", claude_code),
        ("codex", codex),
        ("tracelab", tracelab),
        ("lmcache-agent", lmcache_agent),
        ("swe-agent", swe_agent),
        ("azure", azure),
        ("qwen-bailian", qwen_bailian),
        ("burstgpt", burstgpt),
        ("vllm-multi-turn", vllm_multi_turn),
        ("sglang-agentic", sglang_agentic),
        ("dynamo", dynamo),
        ("otel-genai", otel_genai),
    )
}


def import_trace(
    path: Path,
    output: Path,
    report: ImportReport,
    *,
    format_name: str | None = None,
    dedup: bool = False,
    on_session: Callable[[], None] = lambda: None,
) -> tuple[str, TraceHeader]:
    """Convert ``path`` to a trace file at ``output``; returns the format's name and the header written.

    ``report`` is filled in while records pass, and ``on_session`` called for every session written. Raises InputError
    for anything wrong with the file, an unknown format or one that cannot be told from the content.
    """
    chosen = detect(path) if format_name is None else FORMATS.get(format_name)
    if chosen is None:
        raise unknown_name("format", str(format_name), FORMATS, where="--format")
    imported = chosen.load(path, report)
    sessions = without_duplicates(imported.sessions, report) if dedup else imported.sessions
    sessions = _counted(sessions, path, report, on_session)
    header = TraceHeader(
        name=path.name.split(".")[0] or path.name, block_tokens=imported.block_tokens, block_scope=imported.block_scope,
        source=f"{chosen.name} {path.name}", times=imported.times,
        estimated=tuple(sorted({*imported.estimated, *report.estimated})),
    )  # fmt: skip
    return chosen.name, write_trace(output, header, sessions)


def _counted(sessions: Iterable[Session], path: Path, report: ImportReport, on_session: Callable[[], None]) -> Iterator[Session]:
    for session in sessions:
        on_session()
        report.sessions += 1
        report.calls += len(session.calls)
        yield session
    if report.sessions == 0:
        found = "; ".join(f"{count} {what}" for what, count in report.notes.items()) or "no record"
        raise InputError(f"no model call in it ({found})", where=str(path), fix="is --format right?")


def detect(path: Path) -> Format:
    """The format of ``path`` by its first records. Raises InputError if none or several fit."""
    for sample in itertools.islice(_samples(path), LOOK_AHEAD):
        fitting = [format_ for format_ in FORMATS.values() if format_.detects(sample)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            break
    raise InputError("the format cannot be told from the content", where=str(path), allowed=", ".join(FORMATS), fix="give --format")


def _samples(path: Path) -> Iterator[Any]:
    _, first = next(text_lines(path))
    if first.lstrip()[:1] in ("{", "["):
        for _, value in json_records(path):
            yield value
    else:
        yield first


def without_duplicates(sessions: Iterable[Session], report: ImportReport) -> Iterator[Session]:
    """Drop every session whose prompt and output tokens, call by call, are those of an earlier session."""
    seen: set[bytes] = set()
    for session in sessions:
        shape = repr([(call.prompt_tokens, call.output_tokens) for call in session.calls])
        digest = hashlib.blake2b(shape.encode(), digest_size=16).digest()
        if digest in seen:
            report.note("sessions with the same prompts and outputs as an earlier one dropped")
        else:
            seen.add(digest)
            yield session
