"""τ, γ and ν tuned per workload, each with the interval that is as good, and again with tools three times slower.

A search tunes the three knobs together. Then each knob goes over its sweep's values while the others keep theirs: the interval holds
the values whose SCT p95 is not significantly worse than the tuned one (paired over draws, 95 %).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from optuna.storages import InMemoryStorage

from studies.tuning.common import CHECKS, OBJECTIVE, SPANS, TUNING, Table, measured, ratio, save, share, task, with_tools
from talaria.policy.knobs import BY_NAME
from talaria.report.files import write_atomically
from talaria.report.style import SERIES, panels, styled
from talaria.sim.parallel import Pool
from talaria.sim.scenario import Scenario
from talaria.tune.beats import Pulse
from talaria.tune.goals import by_scenario
from talaria.tune.search import Search
from talaria.tune.task import Task
from talaria.tune.validate import choose, replayed

TRIALS = 40
KEPT = Path("talaria-out/studies")
"""Rows that are done, for a run that is broken off."""
SLOWER = (1.0, 3.0)


@dataclass(frozen=True, slots=True)
class Found:
    """``spans``: per knob the lowest and highest value that is as good as the tuned one; ``tuned_s``: its SCT p95 draw by draw."""

    workload: str
    slower: float
    knobs: dict[str, float]
    spans: dict[str, tuple[float, float]]
    baseline_s: float
    tuned_s: list[float]
    better: str


def tuned(of: Task, pool: Pool) -> dict[str, Any]:
    """The best knobs of a search."""
    search = Search(of, InMemoryStorage(), "study", TRIALS, sampler="tpe", seed=0, pulse=Pulse())
    search.run(pool, lambda finished: None)
    return of.used(choose(of, search.studied.finished()).params)


def as_good(of: Task, best: dict[str, Any], name: str, pool: Pool) -> tuple[float, float]:
    """The stretch of the knob's values around ``best`` that are not significantly worse."""
    (item,) = (item for item in of.space if item.name == name)
    tried = sorted({*(value for value in BY_NAME[name].sweep if item.low <= value <= item.high), best[name]})
    values = measured(of, [{**best, name: value} for value in tried], SPANS, pool)
    base = values[tried.index(best[name])]
    good = [(low := ratio(row, base).low) is None or low <= 0.0 for row in values]
    first = last = tried.index(best[name])
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(tried) and good[last + 1]:
        last += 1
    return tried[first], tried[last]


def study(scenario: Scenario, slower: float, pool: Pool) -> Found:
    """One row of the table."""
    of = task(with_tools(scenario, slower))
    best = tuned(of, pool)
    spans = {item.name: as_good(of, best, item.name, pool) for item in of.space}
    (base,) = replayed(of, [{}], CHECKS, pool)
    base_s = by_scenario(base, OBJECTIVE)[0]
    (tuned_s,) = measured(of, [best], CHECKS, pool)
    change = ratio(tuned_s, base_s)
    return Found(scenario.name, slower, best, spans, fmean(base_s), tuned_s, share(change.mean, change.low, change.high))


def kept(scenario: Scenario, slower: float, pool: Pool) -> Found:
    """``study``, from an earlier run that was broken off where nothing that it rests on has changed since."""
    rests_on = [task(with_tools(scenario, slower)).document(), TRIALS, [*CHECKS], [*SPANS], [item.name for item in fields(Found)]]
    path = KEPT / f"{hashlib.sha256(json.dumps(rests_on, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if path.exists():
        row = json.loads(path.read_text(encoding="utf-8"))
        return Found(**{**row, "spans": {name: tuple(span) for name, span in row["spans"].items()}})
    found = study(scenario, slower, pool)
    write_atomically(path, json.dumps(asdict(found)).encode())
    print(f"{scenario.name} ×{slower:g}", file=sys.stderr)
    return found


@styled
def figure(found: Sequence[Found]) -> Any:
    """One panel a knob, one row a workload: the tuned value and the interval that is as good."""
    names = list(dict.fromkeys(item.workload for item in found))
    drawn, axes_of = panels(len(found[0].knobs), height_in=1.2 + 0.4 * len(names))
    for axes, name in zip(axes_of, found[0].knobs, strict=True):
        for item in found:
            row = names.index(item.workload) + (0.17 if item.slower > 1 else -0.17)
            colour = SERIES[1] if item.slower > 1 else SERIES[0]
            axes.plot(item.spans[name], [row, row], color=colour, linewidth=4, alpha=0.35, solid_capstyle="butt")
            axes.plot([item.knobs[name]], [row], "o", color=colour)
        axes.set(xlabel=f"{name}, {BY_NAME[name].unit}" if BY_NAME[name].unit else name, ylim=(len(names) - 0.5, -0.5))
        axes.set_yticks(range(len(names)), names if axes is axes_of[0] else [""] * len(names))
    for slower, colour in zip(SLOWER, SERIES, strict=False):
        axes_of[-1].plot([], [], "o", color=colour, label=f"tools ×{slower:g}")
    axes_of[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes_of[0].set_title("Tuned, and as good")
    return drawn


def slower_row(scenario: Scenario, recorded: Found, slower: Found, pool: Pool) -> list[str]:
    """What becomes of each knob when tools are slower, and of the policy that was tuned before they were."""
    moves = []
    for name, value in recorded.knobs.items():
        low, high = slower.spans[name]
        moves.append(f"{value:g} → {slower.knobs[name]:g}{' (as good)' if low <= value <= high else ' (**moves**)'}")
    (kept_s,) = measured(task(with_tools(scenario, slower.slower)), [recorded.knobs], CHECKS, pool)
    cost = ratio(kept_s, slower.tuned_s)
    return [scenario.name, *moves, share(cost.mean, cost.low, cost.high)]


def main(workloads: Sequence[Scenario], pool: Pool) -> None:
    """Write ``results/knobs.md``."""
    pairs = [(scenario, *(kept(scenario, slower, pool) for slower in SLOWER)) for scenario in workloads]
    found = [item for _, *both in pairs for item in both]
    rows = [
        [
            item.workload, f"×{item.slower:g}",
            *(f"{item.knobs[name]:g} ({low:g} to {high:g})" for name, (low, high) in item.spans.items()),
            f"{item.baseline_s:,.4g}", f"{fmean(item.tuned_s):,.4g}", item.better,
        ]
        for item in found
    ]  # fmt: skip
    knobs = ["τ, s", "γ", "ν, s"]
    notes = (
        f"A search of {TRIALS} trials over {len(TUNING)} draws tunes all three. SCT p95 is of {len(CHECKS)} draws that no search has seen. "
        f"In parentheses each knob's values that are not significantly worse on {len(SPANS)} of these while the other two keep theirs, "
        "as far as its sweep goes. Change: against the baseline, what the scenario runs with where nothing is tuned; paired, 95 %."
    )
    later = (
        "Tools three times slower: what was tuned as recorded → what is tuned then; as good: the first lies in the interval of the second. "
        "Cost: SCT p95 with slower tools under the policy that was tuned as recorded, against the one tuned for them; paired, 95 %."
    )
    tables: list[Table] = [
        ("", ["workload", "tools", *knobs, "baseline, s", "tuned, s", "change"], rows),
        (
            "When tools are three times slower",
            ["workload", *knobs, "cost of keeping the policy"],
            [slower_row(*pair, pool) for pair in pairs],
        ),
    ]
    save("knobs", "Tuned τ, γ and ν", "python -m studies.tuning knobs TRACE...", f"{notes}\n\n{later}", tables, figure(found))
