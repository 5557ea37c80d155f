"""What is said about a study: the bar's label, the table at the end, and the remarks beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from talaria.policy.knobs import value_text
from talaria.report.document import Document
from talaria.report.metrics import METRICS
from talaria.report.tables import number
from talaria.tune.task import Task
from talaria.tune.validate import GAIN, NO_GAIN


def headline(task: Task, trials: Sequence[FrozenTrial]) -> str:
    """The best value so far of the first objective, beside the defaults'."""
    goal = task.objectives[0]
    values = [trial.values[0] for trial in trials if trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])]
    if not values:
        return "tuning"
    best = min(values) if goal.direction == "minimize" else max(values)
    return f"tuning · best {goal.name} {number(best)}"


def change(entry: Document) -> str:
    """An improvement as ``+12.3 % (8.1 to 16.2)``, or in the metric's own unit."""
    mean, (low, high) = entry["improvement"], entry["ci95"]
    if mean is None:
        return "–"
    scale, unit = (100.0, " %") if entry["relative"] else (1.0, "")
    text = f"{scale * mean:+.3g}{unit}"
    return text if low is None else f"{text} ({scale * low:.3g} to {scale * high:.3g})"


def tune_table(document: Document) -> Any:
    """``talaria.tune/1``: the knobs, then what they gain on the validation draws."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    knobs = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("knob", "default", "tuned", "importance"):
        knobs.add_column(heading, justify="left" if heading == "knob" else "right")
    tuned, default, weights = document["best"]["knobs"], document["default"]["knobs"], document["importance"] or {}
    for name, value in tuned.items():
        weight = weights.get(name)
        knobs.add_row(name, value_text(default[name]), value_text(value), "–" if weight is None else f"{weight:.2f}")
    results = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("objective", "scenario", "default", "tuned", "better by (95 %)", ""):
        results.add_column(heading, justify="left" if heading in ("objective", "scenario", "") else "right")
    for name, entry in document["validation"]["objectives"].items():
        results.add_row(name, "all", number(entry["default"]), number(entry["tuned"]), change(entry), entry["verdict"])
        for scenario, of in document["validation"]["by_scenario"].items():
            row = of[name]
            results.add_row("", scenario, number(row["default"]), number(row["tuned"]), change(row), row["verdict"])
    counts = document["trials"]
    title = f"study {document['study']} · {counts['finished']} trials, {counts['pruned']} stopped early · trial {document['best']['trial']}"
    seeds = document["validation"]["seeds"]
    below = f"on {len(seeds)} draws that the search has not seen, against trial {document['default']['trial']}, the defaults"
    return Group(Text(title, style="bold"), knobs, Text(below, style="bold"), results)


def remarks(document: Document) -> list[str]:
    """What an operator must know before using the policy."""
    said = []
    for name, entry in document["validation"]["objectives"].items():
        if entry["verdict"] == NO_GAIN:
            said.append(f"{name}: {NO_GAIN} over the defaults on new draws")
        elif entry["verdict"] != GAIN and len(document["tuning"]) == 1:
            said.append(f"{name}: worse than the defaults on new draws")
        if entry["overfits"]:
            seen = document["tuning"][name]
            said.append(f"{name}: overfits its draws: {change(seen)} there, {change(entry)} on new ones; give more --seeds")
    said += [f"{limit} does not hold on new draws" for limit in document["validation"]["missed"]]
    return [*said, f"wrote {document['policy']}"]


def unit(name: str) -> str:
    """The unit of an objective."""
    return METRICS[name].unit if name in METRICS else "instances"
