"""Our own format as a source: checks every line and writes the trace anew, for example to compress or dedup it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.trace import SCHEMA, TraceFile


def detects(first: Any) -> bool:
    return isinstance(first, dict) and first.get("schema") == SCHEMA


def load(path: Path, report: ImportReport) -> Imported:
    trace = TraceFile(path)
    header = trace.header
    return Imported(trace.sessions(), header.block_tokens, header.block_scope, header.times, header.estimated)
