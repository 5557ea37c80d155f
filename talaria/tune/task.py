"""What is tuned: scenarios, system, draws, space and goals; and one replay of it, as a worker process runs it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from talaria import __version__
from talaria.errors import InputError
from talaria.policy.knobs import as_dict
from talaria.report.metrics import METRICS, objective
from talaria.sim.config import Config
from talaria.sim.run import RunPlan, TraceOptions, plan, simulate
from talaria.sim.scenario import InstanceGroup, Scenario
from talaria.tune.goals import COST, Constraint, Objective, metric_names
from talaria.tune.space import INSTANCES, Dimension

CODE = ("policy", "substrate", "profiles", "workload", "report", "sim")
"""Packages whose sources decide a replay's numbers."""

Values = dict[str, float]
"""Metrics of one replay by name."""


@dataclass(frozen=True, slots=True)
class Task:
    """``knobs``: values that are given for every scenario, below those that vary; ``seeds``: the draws of every trial, the same for
    all (common random numbers)."""

    scenarios: tuple[Scenario, ...]
    config: Config
    space: tuple[Dimension, ...]
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    seeds: tuple[int, ...]
    knobs: Mapping[str, object] = field(default_factory=dict)
    trace: TraceOptions | None = None

    @property
    def first(self) -> dict[str, Any]:
        """The first trial."""
        return {item.name: item.start for item in self.space}

    def settings(self, scenario: Scenario) -> dict[str, Any]:
        """The varied knobs as ``scenario`` has them without a trial's: the baseline. Raises InputError if it cannot be run."""
        own = as_dict(plan(scenario, self.config, knobs=self.knobs, trace=self.trace).knobs)
        own[INSTANCES] = sum(group.count for group in scenario.instances)
        return {item.name: own[item.name] for item in self.space}

    def begun(self) -> Task:
        """The same task with its first trial where the scenarios are, as far as they agree, and else at the registry's defaults."""
        found = [self.settings(item) for item in self.scenarios]
        agreed = {name: value for name, value in found[0].items() if all(other[name] == value for other in found)}
        return replace(self, space=tuple(item.begun(agreed.get(item.name, item.start)) for item in self.space))

    def used(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values that a trial with ``params`` runs with."""
        return {item.name: item.used(params[item.name]) for item in self.space}

    def replay(self, scenario: Scenario, values: Mapping[str, Any], seed: int) -> Replay:
        """One run under varied ``values``; of the baseline without any."""
        knobs = {**self.knobs, **{name: value for name, value in values.items() if name != INSTANCES}}
        names = metric_names(self.objectives, self.constraints)
        return Replay(self.sized(scenario, values), self.config, knobs, self.trace, seed, names)

    def sized(self, scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
        """``scenario``, with as many instances as ``values`` say."""
        return resized(scenario, values[INSTANCES]) if INSTANCES in values else scenario

    def plans(self) -> list[RunPlan]:
        """The resolved runs of the first trial, one a scenario. Raises InputError before anything runs."""
        names = {name: value for name, value in self.first.items() if name != INSTANCES}
        return [plan(self.sized(item, self.first), self.config, knobs={**self.knobs, **names}, trace=self.trace) for item in self.scenarios]

    def document(self) -> dict[str, Any]:
        """What identifies the study: trials of tasks that differ here do not belong together."""
        return {
            **origin(self.plans()),
            "set": {name: str(value) for name, value in sorted(self.knobs.items())},
            "knobs": {item.name: item.document() for item in self.space},
            "objectives": [item.name for item in self.objectives],
            "constraints": [str(item) for item in self.constraints],
            "seeds": list(self.seeds),
        }


@dataclass(frozen=True, slots=True)
class Replay:
    """One scenario under one policy and one draw; ``names`` are the metrics that are wanted."""

    scenario: Scenario
    config: Config
    knobs: Mapping[str, object]
    trace: TraceOptions | None
    seed: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a replay gave; ``refused``: why these knobs cannot be run at all."""

    values: Values
    cpu_s: float
    refused: str = ""


def measure(replay: Replay) -> Measured:
    """Run one replay: objectives count shed and failed sessions as infinite, an undefined metric takes its worst value."""
    started_s = time.process_time()
    try:
        resolved = plan(replay.scenario, replay.config, knobs=replay.knobs, trace=replay.trace)
    except InputError as error:
        return Measured({}, time.process_time() - started_s, refused=str(error))
    record = simulate(resolved, replay.seed)
    values = {name: objective(record, name) for name in replay.names if name in METRICS}
    if COST in replay.names:
        values[COST] = float(len(resolved.instances))
    return Measured(values, time.process_time() - started_s)


def origin(plans: Sequence[RunPlan]) -> dict[str, Any]:
    """What the numbers of these runs rest on, by content."""
    traces = {item.scenario.name: item for item in plans if "trace" in item.workload}
    return {
        "scenarios": {item.scenario.name: scenario_hash(item.scenario) for item in plans},
        "profiles": {part.profile.name: part.profile.hash for item in plans for part in item.instances},
        "code": code_hash(),
        "config": plans[0].config.name,
        "traces": {
            name: {"sha256": _file_hash(str(item.workload["trace"])), "models": dict(item.mapping), "arrivals": item.arrivals}
            for name, item in traces.items()
        },
    }


def resized(scenario: Scenario, count: int) -> Scenario:
    """``scenario`` with ``count`` instances: its own in their order, over again where it has fewer."""
    single: list[InstanceGroup] = []
    for group in scenario.instances:
        single += [group.model_copy(update={"count": 1})] * min(group.count, count)
    chosen = tuple(single[number % len(single)] for number in range(count))
    return scenario.model_copy(update={"instances": chosen})


def scenario_document(scenario: Scenario) -> dict[str, Any]:
    """The scenario as its file would hold it, defaults included."""
    document: dict[str, Any] = scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
    return document


def scenario_hash(scenario: Scenario) -> str:
    """By content, whatever the file's name, order or comments."""
    return _sha256(json.dumps(scenario_document(scenario), sort_keys=True).encode())


@cache
def code_hash() -> str:
    """Of the sources that decide a replay's numbers, and the version."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for name in CODE for path in (root / name).rglob("*.py"))
    return _sha256(__version__.encode(), *(part for path in files for part in (str(path.relative_to(root)).encode(), path.read_bytes())))


def _file_hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def feasible(violations: Sequence[float]) -> bool:
    """Whether no constraint is missed."""
    return all(value <= 0.0 or math.isclose(value, 0.0, abs_tol=1e-12) for value in violations)
