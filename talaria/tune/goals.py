"""What a study wants: objectives to improve and constraints to hold, and how the values of several scenarios and draws become one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from talaria.errors import InputError, unknown_name
from talaria.report.metrics import METRICS

COST = "cost"
"""An objective that is no metric of a run: the number of its instances."""
LEAST_S = 1e-3
"""Seconds below this count as this in a geometric mean."""

MOST_VIOLATION = 1e9
"""Of a constraint on a metric that is undefined in a run."""

SHARES = frozenset({
    "switch_share", "path_d2d", "path_partial", "path_h2d", "sp_admission_rate", "same_instance_return", "residency_hit", "unused_lease",
    "lease_hit", "kv_device", "kv_host", "kv_missing",
})  # fmt: skip
"""Metrics that lie between 0 and 1; every other one is at least 0."""

ByScenario = Sequence[Sequence[float]]
"""Values of one metric: per scenario, per draw."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One metric to improve. Seconds are compared as ratios, so that a scenario of long sessions does not outweigh the others;
    counts and shares as differences."""

    name: str
    direction: Literal["minimize", "maximize"]

    @property
    def relative(self) -> bool:
        """Whether it is compared as a ratio."""
        return self.name.endswith("_s")

    def combine(self, values: ByScenario) -> float:
        """One value: the mean over draws of each scenario, then the geometric (``relative``) or plain mean over scenarios."""
        means = [math.fsum(draws) / len(draws) for draws in values]
        if self.relative:
            return math.exp(math.fsum(math.log(max(mean, LEAST_S)) for mean in means) / len(means))
        return math.fsum(means) / len(means)

    def gain(self, base: float, other: float) -> float | None:
        """How much better ``other`` is than ``base``: −log of the ratio, or the difference; None where one of them is infinite."""
        if not (math.isfinite(base) and math.isfinite(other)):
            return None
        sign = 1.0 if self.direction == "minimize" else -1.0
        if self.relative:
            return sign * math.log(max(base, LEAST_S) / max(other, LEAST_S))
        return sign * (base - other)

    def as_improvement(self, gain: float) -> float:
        """A mean ``gain`` as readers want it: the share of the base that is saved, or the difference."""
        if not self.relative:
            return gain
        return 1.0 - math.exp(-gain) if self.direction == "minimize" else math.exp(gain) - 1.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """``metric relation bound``; holds if it does in every scenario, by the mean over its draws."""

    metric: str
    relation: Literal["<=", ">=", "=="]
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.bound:.9g}"

    def violation(self, values: ByScenario) -> float:
        """By how much it is missed in the worst scenario; at most 0 where it holds."""
        return min(max(self._missed(math.fsum(draws) / len(draws)) for draws in values), MOST_VIOLATION)

    def _missed(self, mean: float) -> float:
        if self.relation == "==":
            return abs(mean - self.bound)
        return mean - self.bound if self.relation == "<=" else self.bound - mean


NO_CALL_SHED = Constraint("calls_shed", "==", 0.0)
"""Held unless a constraint on shed calls says otherwise."""


def parse_objectives(text: str, *, where: str = "--objective") -> tuple[Objective, ...]:
    """Comma-separated metrics, or ``cost``. Raises InputError on an unknown or repeated one and on one that has no better side."""
    known = [COST, *(name for name, metric in METRICS.items() if metric.better)]
    found: dict[str, Objective] = {}
    for name in (part.strip() for part in text.split(",")):
        if name in METRICS and METRICS[name].better is None:
            raise InputError(f"no side of {name} is better", where=where, allowed=", ".join(known))
        if name not in known:
            raise unknown_name("objective", name, known, where=where)
        if name in found:
            raise InputError(f"objective {name!r} is given twice", where=where, allowed="each objective once")
        better = "lower" if name == COST else METRICS[name].better
        found[name] = Objective(name, "minimize" if better == "lower" else "maximize")
    return tuple(found.values())


_CONSTRAINT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|==)\s*([-+0-9.eE]+)\s*")


def parse_constraints(texts: Sequence[str], *, where: str = "--constraint") -> tuple[Constraint, ...]:
    """``deadline_risk<=50`` and the like. Raises InputError on one that is malformed, unknown or impossible."""
    found = [_parse_constraint(text, where) for text in texts]
    bounds: dict[str, tuple[float, float]] = {}
    for item in found:
        low, high = bounds.get(item.metric, (0.0, 1.0 if item.metric in SHARES else math.inf))
        low = max(low, item.bound) if item.relation != "<=" else low
        high = min(high, item.bound) if item.relation != ">=" else high
        if low > high:
            always = "from 0 to 1" if item.metric in SHARES else "at least 0"
            raise InputError(f"{item} is impossible", where=where, allowed=f"{item.metric} is {always}, and constraints must agree")
        bounds[item.metric] = low, high
    if NO_CALL_SHED.metric not in bounds:
        found.append(NO_CALL_SHED)
    return tuple(found)


def _parse_constraint(text: str, where: str) -> Constraint:
    matched = _CONSTRAINT.fullmatch(text)
    try:
        metric, relation, bound = matched.groups() if matched else ("", "", "")
        value = float(bound)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{text!r} is no constraint", where=where, allowed="METRIC<=NUMBER, METRIC>=NUMBER or METRIC==NUMBER")
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS, where=where)
    return Constraint(metric, relation, value)  # type: ignore[arg-type]


def metric_names(objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """The metrics that a run must give, each once."""
    names = [*(item.name for item in objectives), *(item.metric for item in constraints)]
    return tuple(dict.fromkeys(names))


def by_scenario(draws: Sequence[Sequence[Mapping[str, float]]], name: str) -> list[list[float]]:
    """``draws[draw][scenario][metric]`` as values of one metric per scenario, per draw."""
    return [[values[name] for values in column] for column in zip(*draws, strict=True)]
