"""What the studies share: workloads with faster or slower tools, the SCT p95 of policies draw by draw, and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from talaria.report.files import write_atomically
from talaria.report.statistics import Estimate, estimate
from talaria.report.style import to_png
from talaria.sim import config
from talaria.sim import scenario as scenarios
from talaria.sim.parallel import Pool
from talaria.sim.scenario import Scenario
from talaria.tune.goals import parse_constraints, parse_objectives
from talaria.tune.space import parse_space
from talaria.tune.task import Task, measure

RESULTS = Path(__file__).parent / "results"
OBJECTIVE = "sct_p95_s"
TUNING, CHECKS = range(3), range(10_000, 10_010)
"""Draws of the searches, and the draws on which everything in the tables is measured."""
SPANS = CHECKS[:5]
"""Of these, the draws on which a knob goes over its values."""
TRACE_SCENARIO, TRACE_ARRIVALS = "four-by-five", "closed_pool:32"

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Heading, or none, header and rows."""


def with_trace(path: Path) -> Scenario:
    """The trace's sessions, 32 at a time, on four groups that share five models."""
    base = scenarios.load(TRACE_SCENARIO)
    changed = {"name": path.name.split(".")[0], "workload": {"trace": str(path)}, "arrivals": TRACE_ARRIVALS}
    return base.model_copy(update=changed)


def with_tools(scenario: Scenario, slower: float) -> Scenario:
    """The same calls with gaps, and their cap, ``slower`` times as long."""
    cap_s = None if scenario.gap_cap_s is None else scenario.gap_cap_s * slower
    return scenario.model_copy(update={"workload": {**scenario.workload, "gap_scale": slower}, "gap_cap_s": cap_s})


def task(scenario: Scenario, knobs: str = "tau,gamma,nu") -> Task:
    """``knobs`` on one scenario under the configuration talaria."""
    found = Task(
        (scenario,), config.get("talaria"), parse_space(knobs), parse_objectives(OBJECTIVE), parse_constraints([]), tuple(TUNING)
    )  # fmt: skip
    return found.begun()


def measured(of: Task, policies: Sequence[Mapping[str, Any]], seeds: Iterable[int], pool: Pool) -> list[list[float]]:
    """The objective of each policy, draw by draw."""
    seeds = list(seeds)
    replays = [of.replay(of.scenarios[0], policy, seed) for policy in policies for seed in seeds]
    values = [result.values.get(OBJECTIVE, math.inf) for result in pool.map(measure, replays)]
    return [values[at : at + len(seeds)] for at in range(0, len(values), len(seeds))]


def ratio(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """The mean log ratio of two policies over draws, with its 95 % interval; undefined if a session has no end."""
    if not all(map(math.isfinite, [*values, *base])):
        return Estimate(math.inf, None, math.inf, math.inf)
    return estimate([math.log(value / other) for value, other in zip(values, base, strict=True)])


def save(name: str, title: str, command: str, notes: str, tables: Sequence[Table], figure: Any) -> None:
    """``results/NAME.md`` with its figure beside it."""
    lines = [f"# {title}", "", f"`{command}`", "", notes]
    for heading, header, rows in tables:
        lines += ["", *([f"## {heading}", ""] if heading else []), f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", f"![{title}]({name}.png)", ""]
    write_atomically(RESULTS / f"{name}.md", "\n".join(lines).encode())
    write_atomically(RESULTS / f"{name}.png", to_png(figure))


def share(mean: float | None, low: float | None, high: float | None) -> str:
    """A mean log ratio as the change in percent."""
    if mean is None or low is None or high is None or math.isinf(mean):
        return "–"
    return f"{100 * math.expm1(mean) + 0.0:+.1f} % ({100 * math.expm1(low):+.1f} to {100 * math.expm1(high):+.1f})"
