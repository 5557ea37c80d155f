"""LMCache's agent trace, reduced to sizes: one call per line with characters of prompt, response and shared prefix.

Mapping: a ``file`` is a session (it is the source's session id) and a ``session`` in it one chain of prefixes, our
line. Tokens are estimated from characters. The times are not documented; the data says that they are arrivals and that
a file's calls run one at a time: no call comes sooner than about 6 ms per output token after the one before. So
each call waits for the file's previous call. Its duration is taken as its output at the session's fastest pace, and the
gap is what remains: an estimate too. There is no model name.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import CHARS_PER_TOKEN, UNNAMED_MODEL, RecordedCall, assemble_all, tokens_of_chars
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import MAX_SECONDS, Chars, Name, Record, Seconds, json_records


class _Row(Record):
    file: Name
    session: Name
    t0_us: Annotated[int, Field(ge=0, le=int(MAX_SECONDS) * 1_000_000)]
    t: Seconds
    prompt_chars: Chars
    output_chars: Chars
    shared_prefix_chars: Chars

    @property
    def arrival_s(self) -> float:
        return self.t0_us / 1e6 + self.t


def detects(first: Any) -> bool:
    return isinstance(first, dict) and {"prompt_chars", "output_chars", "shared_prefix_chars", "t0_us"} <= first.keys()


def load(path: Path, report: ImportReport) -> Imported:
    files: dict[str, list[_Row]] = {}
    for where, value in json_records(path):
        row = parse(_Row, value, where)
        files.setdefault(row.file, []).append(row)
    sessions = {name: _calls(sorted(rows, key=lambda row: row.arrival_s)) for name, rows in files.items()}
    estimated = ("prompt_tokens", "output_tokens", "gap_s", "reuse_tokens")
    return Imported(assemble_all(sessions, report), times=True, estimated=estimated)


def _calls(rows: list[_Row]) -> list[RecordedCall]:
    s_per_token = _fastest_s_per_token(rows)
    lines: dict[str, str] = {}
    last: dict[str, _Row] = {}
    calls: list[RecordedCall] = []
    for number, row in enumerate(rows):
        agent = lines.setdefault(row.session, f"chain-{len(lines)}" if lines else "main")
        before = last.get(row.session)
        last[row.session] = row
        broken = before is not None and row.shared_prefix_chars < before.prompt_chars
        output_tokens = tokens_of_chars(row.output_chars)
        calls.append(
            RecordedCall(
                UNNAMED_MODEL, tokens_of_chars(row.prompt_chars), output_tokens, agent, start_s=row.arrival_s,
                end_s=row.arrival_s + s_per_token * output_tokens, key=str(number), after=(str(number - 1),) if number else (),
                reuse_tokens=row.shared_prefix_chars // CHARS_PER_TOKEN if broken else None,
            )
        )  # fmt: skip
    return calls


def _fastest_s_per_token(rows: list[_Row]) -> float:
    """The shortest time from a call to the next, per output token: an upper bound of the model's pace."""
    pairs = itertools.pairwise(rows)
    return min(((after.arrival_s - before.arrival_s) / tokens_of_chars(before.output_chars) for before, after in pairs), default=0.0)
