"""What is said about a study: the bar's label, the table at the end, and the remarks beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from talaria.policy.knobs import value_text
from talaria.report.document import Document
from talaria.report.metrics import METRICS
from talaria.report.tables import number
from talaria.tune.task import Task
from talaria.tune.validate import GAIN, NO_GAIN

BASELINE = "each scenario as it runs untuned"


def headline(task: Task, trials: Sequence[FrozenTrial]) -> str:
    """The best value so far of the first objective."""
    goal = task.objectives[0]
    values = [trial.values[0] for trial in trials if trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])]
    if not values:
        return "tuning"
    best = min(values) if goal.direction == "minimize" else max(values)
    return f"tuning · best {goal.name} {number(best)}"


def baseline(settings: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """A knob's value in the baseline, by scenario; one each, in their order, where they differ."""
    values = [value_text(of[name]) for of in settings.values()]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def baseline_line(task: Task) -> str:
    """What the result will be compared with."""
    settings = {item.name: task.settings(item) for item in task.scenarios}
    return f"baseline: {BASELINE}: " + ", ".join(f"{item.name} {baseline(settings, item.name)}" for item in task.space)


def change(entry: Document) -> str:
    """An improvement as ``+12.3 % (8.1 to 16.2)``, or in the metric's own unit."""
    mean, (low, high) = entry["improvement"], entry["ci95"]
    if mean is None:
        return "–"
    scale, unit = (100.0, " %") if entry["relative"] else (1.0, "")
    text = f"{scale * mean:+.3g}{unit}"
    return text if low is None else f"{text} ({scale * low:.3g} to {scale * high:.3g})"


def results_by_scenario(checked: Document) -> list[tuple[str, str, Document]]:
    """Objective, scenario and result: over all scenarios, then in each, where there are several."""
    each, rows = checked["by_scenario"], []
    for name, entry in checked["objectives"].items():
        rows += [(name, "all", entry)] if len(each) > 1 else []
        rows += [(name, scenario, of[name]) for scenario, of in each.items()]
    return rows


def tune_table(document: Document) -> Any:
    """``talaria.tune/1``: the knobs, then what they gain on the validation draws."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    knobs = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("knob", "baseline", "tuned", "importance"):
        knobs.add_column(heading, justify="left" if heading == "knob" else "right")
    tuned, weights = document["best"]["knobs"], document["importance"] or {}
    for name, value in tuned.items():
        weight = weights.get(name)
        knobs.add_row(name, baseline(document["baseline"], name), value_text(value), "–" if weight is None else f"{weight:.2f}")
    results = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("objective", "scenario", "baseline", "tuned", "better by (95 %)", ""):
        results.add_column(heading, justify="left" if heading in ("objective", "scenario", "") else "right")
    shown = ""
    for name, scenario, entry in results_by_scenario(document["validation"]):
        heading, shown = "" if name == shown else name, name
        results.add_row(heading, scenario, number(entry["baseline"]), number(entry["tuned"]), change(entry), entry["verdict"])
    counts = document["trials"]
    title = f"study {document['study']} · {counts['finished']} trials, {counts['pruned']} stopped early · trial {document['best']['trial']}"
    seeds = document["validation"]["seeds"]
    below = f"on {len(seeds)} draws that the search has not seen, against the baseline: {BASELINE}"
    return Group(Text(title, style="bold"), knobs, Text(below, style="bold"), results)


def remarks(document: Document) -> list[str]:
    """What an operator must know before using the policy."""
    said = []
    for name, entry in document["validation"]["objectives"].items():
        if entry["verdict"] == NO_GAIN:
            said.append(f"{name}: {NO_GAIN} over the baseline on new draws")
        elif entry["verdict"] != GAIN and len(document["tuning"]) == 1:
            said.append(f"{name}: worse than the baseline on new draws")
        if entry["overfits"]:
            seen = document["tuning"][name]
            said.append(f"{name}: overfits its draws: {change(seen)} there, {change(entry)} on new ones; give more --seeds")
    said += [f"{limit} does not hold on new draws" for limit in document["validation"]["missed"]]
    return [*said, f"wrote {document['policy']}"]


def unit(name: str) -> str:
    """The unit of an objective."""
    return METRICS[name].unit if name in METRICS else "instances"
