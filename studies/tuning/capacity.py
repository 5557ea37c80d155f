"""The fewest instances that keep SCT p95 under a target, found by bisection: more instances never make sessions slower by much.

A number of instances keeps the target if the upper end of the 95 % interval of SCT p95 over the check draws lies below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from studies.tuning.common import CHECKS, measured, save, task
from talaria.report.statistics import Estimate, estimate
from talaria.report.style import INK, SERIES, panels, styled
from talaria.sim.parallel import Pool
from talaria.sim.scenario import Scenario

MOST = 16
TARGETS_S = (600.0, 400.0, 300.0)
POLICIES: dict[str, Mapping[str, float]] = {
    "defaults": {"tau": 1.0, "gamma": 0.9, "nu": 20.0},
    "no leases": {"tau": 0.0, "gamma": 0.9, "nu": 20.0},
    "opens are free": {"tau": 1.0, "gamma": 0.9, "nu": 0.0},
}


def fewest(keeps: Callable[[int], bool], most: int) -> int | None:
    """The smallest number up to ``most`` that ``keeps``, which is to be false below some number and true from there on; None: none."""
    if not keeps(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle + 1, high)
    return high


class Capacity:
    """SCT p95 of one policy by number of instances; each number is simulated once."""

    def __init__(self, scenario: Scenario, policy: Mapping[str, Any], pool: Pool) -> None:
        self._task, self._policy, self._pool = task(scenario, f"tau,gamma,nu,instances=1:{MOST}"), policy, pool
        self.found: dict[int, Estimate] = {}

    def at(self, instances: int) -> Estimate:
        """Its mean and interval over the check draws."""
        if instances not in self.found:
            (values,) = measured(self._task, [{**self._policy, "instances": instances}], CHECKS, self._pool)
            self.found[instances] = estimate(values)
        return self.found[instances]

    def keeps(self, instances: int, target_s: float) -> bool:
        """Whether so many instances keep the target."""
        high = self.at(instances).high
        return high is not None and high <= target_s


@styled
def figure(curves: Mapping[str, Capacity]) -> Any:
    """What was simulated on the way, and the targets."""
    drawn, (axes,) = panels()
    for colour, (name, capacity) in zip(SERIES, curves.items(), strict=False):
        points = sorted(capacity.found.items())
        axes.plot([count for count, _ in points], [value.mean for _, value in points], "o-", color=colour, label=name, markersize=5)
        low, high = [value.low for _, value in points], [value.high for _, value in points]
        axes.fill_between([count for count, _ in points], low, high, color=colour, alpha=0.16, linewidth=0)
    for target_s in TARGETS_S:
        axes.axhline(target_s, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(title="Instances and SCT p95", xlabel="instances", ylabel="SCT p95, s", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def main(scenario: Scenario, pool: Pool) -> None:
    """Write ``results/capacity.md``."""
    curves = {name: Capacity(scenario, policy, pool) for name, policy in POLICIES.items()}
    rows = []
    for target_s in TARGETS_S:
        for name, capacity in curves.items():
            count = fewest(lambda number, of=capacity, target=target_s: of.keeps(number, target), MOST)  # type: ignore[misc]
            value = capacity.at(MOST if count is None else count)
            rows.append([
                f"{target_s:g}", name, f"more than {MOST}" if count is None else str(count),
                f"{value.mean:,.4g} ({value.low:,.4g} to {value.high:,.4g})",
            ])  # fmt: skip
    simulated = sum(len(capacity.found) for capacity in curves.values())
    notes = (
        f"{scenario.name}: {scenario.about} Its groups are repeated in turn. {len(CHECKS)} draws, upper end of the 95 % interval below the "
        f"target; {simulated} of {MOST * len(curves)} numbers of instances had to be simulated."
    )
    header = ["target, s", "policy", "instances", "SCT p95 there, s"]
    save("capacity", "Fewest instances for a target", "python -m studies.tuning capacity", notes, [("", header, rows)], figure(curves))
