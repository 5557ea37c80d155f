"""Puts a fit's values where users meet them: into the shipped profile and the scenarios, marked as fitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from studies.calibrate.draft import SCENARIOS, Draft
from studies.calibrate.testbed import Testbed
from talaria.profiles.load import DATA
from talaria.profiles.schema import ProfileFile
from talaria.report.files import write_atomically
from talaria.validation import parse

SECTIONS = ("workload", "arrivals", "knobs")
"""Lines of a scenario file that parameters can change; everything else in it stays as it was written."""


def source(testbed: Testbed) -> str:
    return f"studies/calibrate, testbed {testbed.name}: fitted on arXiv 2607.17181v1 (studies/calibrate/results/{testbed.name}.json)"


def draft_of(testbed: Testbed) -> Draft:
    return Draft(testbed.profile, testbed.scenarios, source(testbed))


def put(testbed: Testbed, draft: Draft, values: dict[str, float]) -> None:
    for parameter in testbed.parameters:
        parameter.put(draft, values[parameter.name])


def write(testbed: Testbed, values: dict[str, float]) -> None:
    """Change the shipped files."""
    draft = draft_of(testbed)
    put(testbed, draft, values)
    file = parse(ProfileFile, draft.profile, testbed.profile)
    write_atomically(DATA / f"{testbed.profile}.json", file.text().encode())
    for name, document in draft.scenarios.items():
        path = SCENARIOS / f"{name}.yaml"
        write_atomically(path, _rewritten(path, document).encode())


def _rewritten(path: Path, document: dict[str, Any]) -> str:
    """The scenario's text with the one-line sections replaced; a section that it does not have yet goes before the notes."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at: Callable[[str], int | None] = lambda key: next((i for i, line in enumerate(lines) if line.startswith(f"{key}:")), None)  # noqa: E731
    for key in SECTIONS:
        if key not in document:
            continue
        text = f"{key}: {_one_line(document[key])}"
        index = at(key)
        if index is None:
            notes = at("notes")
            lines.insert(len(lines) if notes is None else notes, text)
        else:
            lines[index] = text
    return "\n".join(lines) + "\n"


def _one_line(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
