"""The testbeds by name, and which of them have a result."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from studies.calibrate import report
from studies.calibrate.testbed import Testbed

NAMES = ("tp8", "tp4")


def load(name: str) -> Testbed:
    found: Testbed = importlib.import_module(f"studies.calibrate.{name}").TESTBED
    return found


def calibrated(profile: dict[str, Any]) -> dict[str, Any]:
    """The document of a profile with the values of the fits that concern it."""
    for testbed, values in _results():
        if testbed.profile == profile["name"]:
            draft = testbed.draft(profile)
            testbed.put(draft, values)
            profile = draft.profile
    return profile


def _results() -> Iterator[tuple[Testbed, dict[str, float]]]:
    for name in NAMES:
        if report.path(name).exists():
            yield load(name), report.values_of(report.load(name))
