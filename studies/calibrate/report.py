"""What a fit leaves: parameters with bounds and sensitivities, residuals of every number, as one JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from studies.calibrate.draft import Draft
from studies.calibrate.loss import Found, Trial, loss, miss
from studies.calibrate.parameters import Parameter
from studies.calibrate.testbed import Fitted, Testbed
from talaria import __version__
from talaria.errors import InputError
from talaria.profiles.load import read_json
from talaria.report.files import write_atomically

RESULTS = Path(__file__).parent / "results"
CHANGE = 0.25


def document(testbed: Testbed, draft: Draft, values: dict[str, float]) -> dict[str, Any]:
    """The whole result: rebuilt from the values alone, over the polish's draws."""
    residuals, found = Trial(testbed, draft, values).residuals(testbed.polish_seeds)
    if found is None:
        raise SystemExit("no run is possible with these values")
    few, found_of_few = Trial(testbed, draft, values).residuals(testbed.search_seeds)
    assert found_of_few is not None
    return {
        "testbed": testbed.name,
        "version": __version__,
        "seeds": {"search": [*testbed.search_seeds], "polish": [*testbed.polish_seeds]},
        "loss": round(loss(residuals), 3),
        "parameters": [_parameter(testbed, draft, values, parameter, loss(few), found_of_few) for parameter in testbed.parameters],
        "residuals": [_residual(target, found) for target in testbed.fitted],
    }


def _parameter(
    testbed: Testbed, draft: Draft, values: dict[str, float], parameter: Parameter, base: float, found: Found
) -> dict[str, Any]:  # fmt: skip
    """One parameter, and what becomes of loss and fitted numbers if it is a quarter smaller or larger (within its bounds); search draws."""
    value = values[parameter.name]
    moved = {}
    for sign in (-1, 1):
        at = parameter.clip(value * (1 + sign * CHANGE))
        residuals, other = Trial(testbed, draft, {**values, parameter.name: at}).residuals(testbed.search_seeds)
        entry: dict[str, Any] = {"at": at, "loss_change": round(loss(residuals) - base, 3)}
        if other is not None:
            entry["moves"] = _moves(testbed, found, other)
        moved[f"{sign * CHANGE:+.0%}"] = entry
    return {
        "name": parameter.name, "unit": parameter.unit, "low": parameter.low, "high": parameter.high, "value": value, "why": parameter.why,
        "sensitivity": moved,
    }  # fmt: skip


def _moves(testbed: Testbed, found: Found, other: Found, largest: int = 5) -> dict[str, float]:
    """Relative changes of the numbers that move most."""
    changes = {}
    for target in testbed.fitted:
        before, after = found.mean(target), other.mean(target)
        if before and after is not None:
            changes[target.name] = round(after / before - 1.0, 3)
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1]))[:largest])


def _residual(target: Fitted, found: Found) -> dict[str, Any]:
    simulated = found.mean(target)
    error = simulated / target.published - 1.0 if simulated is not None and target.published else None
    return {
        "name": target.name, "published": target.published, "simulated": None if simulated is None else float(f"{simulated:.4g}"),
        "error": None if error is None else round(error, 4), "bars": round(miss(target, simulated), 3), "weight": target.weight,
    }  # fmt: skip


def save(result: dict[str, Any]) -> None:
    write_atomically(path(result["testbed"]), (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())


def path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    """Raises InputError where there is no result, or a file that holds none."""
    result = read_json(path(name))
    if not isinstance(result, dict) or not {"parameters", "residuals"} <= result.keys():
        raise InputError("holds no result", where=str(path(name)), fix=f"python -m studies.calibrate fit {name}")
    return result


def values_of(result: dict[str, Any]) -> dict[str, float]:
    return {item["name"]: item["value"] for item in result["parameters"]}


def table(result: dict[str, Any]) -> str:
    """Residuals and parameters as text."""
    lines = [f"{'number':44s} {'published':>10s} {'simulated':>10s} {'error':>8s}"]
    for row in result["residuals"]:
        error = "" if row["error"] is None else f"{row['error']:+.1%}"
        simulated = "none" if row["simulated"] is None else f"{row['simulated']:.4g}"
        lines.append(f"{row['name']:44s} {row['published']:10.4g} {simulated:>10s} {error:>8s}{'' if row['weight'] else '   not fitted'}")
    lines += ["", f"{'parameter':28s} {'low':>10s} {'value':>10s} {'high':>10s}  loss at -25 %, +25 %"]
    for row in result["parameters"]:
        moved = ", ".join(f"{entry['loss_change']:+.2f}" for entry in row["sensitivity"].values())
        lines.append(f"{row['name']:28s} {row['low']:10.4g} {row['value']:10.4g} {row['high']:10.4g}  {moved}")
    return "\n".join(lines)
