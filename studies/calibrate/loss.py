"""How far a set of values is from the published numbers: means over draws, compared as log-ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from studies.calibrate.draft import Draft
from studies.calibrate.testbed import Fitted, Testbed
from talaria.errors import InputError
from talaria.policy.timing import Timing
from talaria.profiles.profile import resolve
from talaria.profiles.schema import ProfileFile
from talaria.report.conservation import ConservationError
from talaria.report.measured import Array
from talaria.report.statistics import sct_by_session, sessions_improved
from talaria.reproduce.experiments import Experiment, experiment
from talaria.reproduce.measures import Values, of_components, of_run
from talaria.reproduce.targets import ComponentSource, CurveSource
from talaria.sim.run import RunPlan, simulate

Residuals = npt.NDArray[np.float64]
IMPOSSIBLE = 20.0
"""Residual of values with which no run is possible, and the most that a miss counts."""
_WORST = 5.0
"""Residual of a number that was never seen."""


@dataclass(slots=True)
class Found:
    """Values and session times of the draws so far, by experiment; values of the component run."""

    values: dict[Experiment, list[Values]]
    scts_s: dict[Experiment, list[Array]]
    curves: dict[str, Timing]
    """Of the profile's models."""
    components: list[Values] = field(default_factory=list)

    def mean(self, target: Fitted) -> float | None:
        """The target's simulated mean over the draws that define it, in the published unit."""
        if isinstance(target.source, ComponentSource):
            return _mean(self.components, target.source.measure, target.scale)
        if isinstance(target.source, CurveSource):
            return self.curves[target.source.model].prefill_s(0, 0, target.source.lost_tokens)
        key = experiment(target.source)
        if target.source.versus is not None:
            pairs = zip(self.scts_s[key], self.scts_s[Experiment(key.scenario, target.source.versus)], strict=True)
            return float(np.mean([sessions_improved(a, b) for a, b in pairs]))
        return _mean(self.values[key], target.source.metric, target.scale)


def _mean(runs: Iterable[Values], name: str, scale: float) -> float | None:
    seen = [value for values in runs if (value := values[name]) is not None]
    return float(np.mean(seen)) * scale if seen else None


class Trial:
    """One set of parameter values, run draw by draw."""

    def __init__(self, testbed: Testbed, draft: Draft, values: Mapping[str, float]) -> None:
        self._testbed = testbed
        self._plans: dict[Experiment, RunPlan] | None = None
        self._draft = draft.copy()
        testbed.put(self._draft, values)
        try:
            self._plans = self._draft.plans(testbed.experiments)
        except InputError:
            self._plans = None

    def residuals(self, seeds: Iterable[int], tell: Callable[[int, float], None] | None = None) -> tuple[Residuals, Found | None]:
        """Weighted residuals of means over ``seeds``. ``tell(draws, loss)`` is called after each; what it raises ends a hopeless trial."""
        count = len(self._testbed.fitted) + len(self._testbed.orders)
        if self._plans is None:
            return np.full(count, IMPOSSIBLE), None
        found = Found({key: [] for key in self._plans}, {key: [] for key in self._plans}, self._curves())
        residuals = np.full(count, IMPOSSIBLE)
        for draws, seed in enumerate(seeds, 1):
            try:
                for key, plan in self._plans.items():
                    record = simulate(plan, seed)
                    found.values[key].append(of_run(record))
                    found.scts_s[key].append(sct_by_session(record))
                if self._testbed.has_components:
                    found.components.append(of_components(self._draft.component_records(seed)))
            except (ConservationError, InputError):
                return np.full(count, IMPOSSIBLE), None
            residuals = np.array([*self._misses(found)])
            if tell is not None:
                tell(draws, loss(residuals))
        return residuals, found

    def _curves(self) -> dict[str, Timing]:
        profile = resolve(ProfileFile.model_validate(self._draft.profile))
        return {name: profile.timing(name) for name in profile.models}

    def _misses(self, found: Found) -> Iterator[float]:
        for target in self._testbed.fitted:
            yield math.sqrt(target.weight) * miss(target, found.mean(target))
        for order in self._testbed.orders:
            low, high = (
                np.mean([values[order.metric] or 0.0 for values in found.values[key]]) for key in (order.below, order.above)
            )  # fmt: skip
            over = math.log(low / (order.factor * high)) if low > 0.0 and high > 0.0 else 0.0
            yield math.sqrt(order.weight) * max(0.0, over) / order.error_at_one


def miss(target: Fitted, simulated: float | None) -> float:
    """Signed, 1 at the bar: a log-ratio for times, a difference for counts near zero."""
    if simulated is None:
        return _WORST
    if target.absolute:
        size = (simulated - target.published) / target.error_at_one
    elif simulated <= 0.0:
        return -_WORST
    else:
        size = math.log(simulated / target.published) / target.error_at_one
    return min(max(size, -IMPOSSIBLE), IMPOSSIBLE)


def loss(residuals: Residuals) -> float:
    """Soft absolute value: squared inside the bar, linear beyond it, so that a number that cannot be met does not bend the others."""
    return float(np.sum(2.0 * (np.sqrt(1.0 + residuals**2) - 1.0)))
