"""Puts a fit's values where users meet them: into the shipped profile and the scenarios, marked as fitted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from studies.calibrate.draft import SCENARIOS
from studies.calibrate.testbed import Testbed
from talaria.profiles.load import DATA
from talaria.profiles.schema import ProfileFile
from talaria.report.files import write_atomically
from talaria.sim import components
from talaria.validation import parse

SECTIONS = ("workload", "arrivals", "telemetry", "knobs")
"""Lines of a scenario file that parameters can change; everything else in it stays as it was written."""


def write(testbed: Testbed, values: dict[str, float]) -> None:
    """Change the shipped files."""
    draft = testbed.draft()
    testbed.put(draft, values)
    file = parse(ProfileFile, draft.profile, testbed.profile)
    write_atomically(DATA / f"{testbed.profile}.json", file.text().encode())
    for name, document in draft.scenarios.items():
        path = SCENARIOS / f"{name}.yaml"
        write_atomically(path, _rewritten(path, document, SECTIONS).encode())
    numbers = [key for key, value in draft.components.items() if isinstance(value, float)]
    write_atomically(components.FILE, _rewritten(components.FILE, draft.components, numbers).encode())


def _rewritten(path: Path, document: dict[str, Any], sections: Iterable[str]) -> str:
    """The scenario's text with the one-line sections replaced; a section that it does not have yet goes before the notes."""
    lines = path.read_text(encoding="utf-8").splitlines()

    def at(key: str) -> int | None:
        return next((number for number, line in enumerate(lines) if line.startswith(f"{key}:")), None)

    for key in sections:
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
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
