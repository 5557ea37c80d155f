"""``talaria.reproduce/1``: every published number with the simulator's, and what they come to together."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from talaria import __version__
from talaria.report.document import Document, Host, rounded
from talaria.reproduce.checks import checks, error_summary
from talaria.reproduce.experiments import Findings
from talaria.reproduce.targets import Group, Target, TargetFile

REPRODUCE_SCHEMA = "talaria.reproduce/1"

MILLISECONDS = 1e3


def reproduce_document(targets: TargetFile, found: Findings, host: Host | None = None) -> Document:
    """All targets with mean, spread and relative error; errors by group, the bars' checks, notes and provenance."""
    numbers = [_row(group, target, found) for group, target in targets.targets()]
    profiles = {item.profile.name: item.profile.hash for planned in found.plans.values() for item in planned.instances}
    document: Document = {
        "schema": REPRODUCE_SCHEMA,
        "source": targets.source,
        "seeds": found.seeds,
        "groups": {group.name: group.title for group in targets.groups},
        "numbers": numbers,
        "errors": _errors(targets, numbers),
        "checks": [asdict(check) for check in checks(numbers, found)],
        "notes": targets.notes,
        "provenance": {"version": __version__, "profiles": profiles},
    }
    if host is not None:
        document["host"] = asdict(host)
    result: Document = rounded(document)
    return result


def _row(group: Group, target: Target, found: Findings) -> dict[str, Any]:
    """One target. ``error`` is relative to the published value and None where that is zero or the target is no result."""
    row: dict[str, Any] = {
        "group": group.name,
        "name": target.at,
        "kind": target.kind,
        "unit": target.unit,
        "published": target.value,
        "simulated": None,
        "std": None,
        "ci95": [None, None],
        "defined_seeds": 0,
        "error": None,
        "by": None if target.by is None else target.by.model_dump(exclude_none=True),
        "notes": list(target.notes),
    }
    if target.by is None:
        return row
    value, spread, row["defined_seeds"] = found.predict(target.by)
    scale = MILLISECONDS if target.unit == "ms" else 1.0
    if spread is not None:
        value = _scaled(spread.mean, scale)
        row["std"], row["ci95"] = _scaled(spread.std, scale), [_scaled(spread.low, scale), _scaled(spread.high, scale)]
    row["simulated"] = value
    if target.kind == "result" and isinstance(target.value, int | float) and target.value and value is not None:
        row["error"] = value / target.value - 1.0
    return row


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _errors(targets: TargetFile, numbers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Absolute relative errors of the results by group, then over the TP=8 replay with its switches, then over everything."""
    parts = [(group.title, [group.name]) for group in targets.groups]
    parts += [("TP=8: replay and its switches", ["tp8", "switch"]), ("TP=8, component run included", ["tp8", "switch", "component"])]
    parts.append(("all results", [group.name for group in targets.groups]))
    return [{"of": title, "groups": names, **error_summary(numbers, names)} for title, names in parts]
