"""SWE-agent trajectories: a ``.traj`` document, or its reduction to character counts, one step per line.

Mapping: a trajectory is a session, a step a call. Its prompt is the first prompt plus all responses and observations
so far; tokens are estimated from characters. The tool's execution time is the gap before the *next* call; where it was
not recorded the gap is zero, and that is counted. In a ``.traj`` the first prompt is what its history holds
before the first answer. There are no starts and no model names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from talaria.validation import parse
from talaria.workload.importers.assemble import UNNAMED_MODEL, RecordedCall, assemble, chars_of, tokens_of_chars
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import Chars, Name, Record, Seconds, json_records


class _Step(Record):
    """One line of the reduced form, and what a step of a ``.traj`` is turned into."""

    traj: Name
    first_prompt_chars: Chars
    response_chars: Chars
    observation_chars: Chars
    tool_exec_s: Seconds | None = None


class _TrajStep(Record):
    response: str = ""
    observation: str | None = ""
    execution_time: Seconds | None = None


class _HistoryItem(Record):
    role: str | None = None
    content: Any = ""


class _Traj(Record):
    trajectory: list[_TrajStep] = Field(min_length=1)
    history: list[_HistoryItem] = Field(default_factory=list)


def detects(first: Any) -> bool:
    return isinstance(first, dict) and ("trajectory" in first or {"traj", "response_chars", "observation_chars"} <= first.keys())


def load(path: Path, report: ImportReport) -> Imported:
    sessions: dict[str, list[_Step]] = {}
    for number, (where, value) in enumerate(json_records(path)):
        steps = _traj_steps(path, number, parse(_Traj, value, where)) if _is_traj(value) else iter([parse(_Step, value, where)])
        for step in steps:
            sessions.setdefault(step.traj, []).append(step)
    built = [assemble(name, _calls(steps, report), report) for name, steps in sessions.items()]
    return Imported(built, estimated=("prompt_tokens", "output_tokens", "reuse_tokens"))


def _is_traj(value: Any) -> bool:
    return isinstance(value, dict) and "trajectory" in value


def _traj_steps(path: Path, number: int, traj: _Traj) -> Iterator[_Step]:
    first_prompt_chars = 0
    for item in traj.history:
        if item.role == "assistant":
            break
        first_prompt_chars += chars_of(item.content)
    for step in traj.trajectory:
        yield _Step(
            traj=f"{path.name}#{number}" if number else path.name, first_prompt_chars=first_prompt_chars,
            response_chars=len(step.response), observation_chars=len(step.observation or ""), tool_exec_s=step.execution_time,
        )  # fmt: skip


def _calls(steps: list[_Step], report: ImportReport) -> Iterator[RecordedCall]:
    chars = steps[0].first_prompt_chars
    gap_s = 0.0
    for step in steps:
        yield RecordedCall(UNNAMED_MODEL, tokens_of_chars(chars), tokens_of_chars(step.response_chars), gap_s=gap_s)
        chars += step.response_chars + step.observation_chars
        gap_s = step.tool_exec_s or 0.0
        if step.tool_exec_s is None and step is not steps[-1]:
            report.note("gaps without a recorded tool time taken as zero", estimates="gap_s")
