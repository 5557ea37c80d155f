"""Is the best τ still good when tools are faster or slower? SCT p95 over τ, relative to each speed's own best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from studies.tuning.common import CHECKS, measured, ratio, save, share, task, with_tools
from talaria.report.style import SERIES, panels, styled
from talaria.sim.parallel import Pool
from talaria.sim.scenario import Scenario

TAUS = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
SLOWER = (1 / 3, 1.0, 3.0)

Curves = dict[str, list[float]]
"""Mean change in SCT p95 against the best τ, per τ, by speed."""


def label(slower: float) -> str:
    """How a speed is called."""
    return "tools 3× faster" if slower < 1 else "as recorded" if slower == 1 else "tools 3× slower"


def study(scenario: Scenario, pool: Pool) -> tuple[list[list[str]], Curves]:
    """A row per speed: its best τ, and what the τ that is best at the recorded speed costs there."""
    rows, curves = [], {}
    by_speed = {
        slower: measured(task(with_tools(scenario, slower), "tau=0:10"), [{"tau": tau} for tau in TAUS], CHECKS, pool) for slower in SLOWER
    }
    recorded = _best(by_speed[1.0])
    for slower, values in by_speed.items():
        best = _best(values)
        costs = [ratio(row, values[best]) for row in values]
        curves[label(slower)] = [100 * math.expm1(cost.mean or 0.0) for cost in costs]
        good = [f"{tau:g}" for tau, cost in zip(TAUS, costs, strict=True) if cost.low is None or cost.low <= 0.0]
        kept = costs[recorded]
        loss = "–" if best == recorded else share(kept.mean, kept.low, kept.high)
        rows.append([scenario.name, label(slower), f"{TAUS[best]:g}", ", ".join(good), f"{TAUS[recorded]:g}", loss])
    return rows, curves


def _best(values: Sequence[Sequence[float]]) -> int:
    return min(range(len(values)), key=lambda index: math.fsum(map(math.log, values[index])))


@styled
def figure(curves: dict[str, Curves]) -> Any:
    """One panel a workload, one line a speed."""
    drawn, axes_of = panels(len(curves))
    for axes, (workload, lines) in zip(axes_of, curves.items(), strict=True):
        for colour, (name, values) in zip(SERIES, lines.items(), strict=False):
            axes.plot(range(len(TAUS)), values, "o-", color=colour, label=name, markersize=4)
        axes.set(title=workload, xlabel="tau, s")
        axes.set_xticks(range(len(TAUS)), [f"{tau:g}" for tau in TAUS])
    axes_of[0].set_ylabel("SCT p95 above the best, %")
    axes_of[(len(axes_of) - 1) // 2].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return drawn


def main(workloads: Sequence[Scenario], pool: Pool) -> None:
    """Write ``results/robustness.md``."""
    rows, curves = [], {}
    for scenario in workloads:
        of_workload, curves[scenario.name] = study(scenario, pool)
        rows += of_workload
    notes = (
        f"{len(CHECKS)} draws. As good: values of τ that are not significantly worse than the best (paired, 95 %). Cost: SCT p95 at this "
        "speed under the τ that is best at the recorded speed."
    )
    header = ["workload", "tools", "best τ, s", "as good, s", "best as recorded, s", "cost of keeping that"]
    title = "τ under faster and slower tools"
    save("robustness", title, "python -m studies.tuning robustness", notes, [("", header, rows)], figure(curves))
