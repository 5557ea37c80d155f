"""What a testbed's file declares: unknowns, the published numbers that they are fitted on, and orders that must hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from studies.calibrate.draft import Draft
from studies.calibrate.parameters import Parameter
from talaria.profiles.load import DATA, read_json
from talaria.reproduce import targets
from talaria.reproduce.experiments import Experiment, experiment
from talaria.reproduce.targets import ComponentSource, CurveSource, RunSource

Source = RunSource | ComponentSource | CurveSource


@dataclass(frozen=True, slots=True)
class Fitted:
    """One published number that the fit is held to; with ``weight`` 0 it is only shown among the residuals.

    ``error_at_one`` is the miss that counts as one, its bar: a log-ratio, or a difference for counts near zero.
    """

    name: str
    published: float
    source: Source
    error_at_one: float
    weight: float = 1.0
    absolute: bool = False
    scale: float = 1.0
    """Of the published unit in ours: 1000 for milliseconds."""


@dataclass(frozen=True, slots=True)
class Order:
    """``below`` of one experiment is at most ``factor`` times that of ``above``; a violation counts like a miss of ``error_at_one``."""

    metric: str
    below: Experiment
    above: Experiment
    factor: float = 1.0
    error_at_one: float = 0.05
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Testbed:
    """``scenarios`` are those that the parameters touch; ``seeds`` of the search and of the polish lie below 1000."""

    name: str
    profile: str
    scenarios: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    fitted: tuple[Fitted, ...]
    orders: tuple[Order, ...] = ()
    search_seeds: range = range(0, 4)
    polish_seeds: range = range(0, 8)

    def draft(self, profile: dict[str, Any] | None = None) -> Draft:
        """The shipped documents, or those with another state of the profile."""
        source = f"studies/calibrate/results/{self.name}.json, fitted on arXiv 2607.17181v1"
        return Draft(read_json(DATA / f"{self.profile}.json") if profile is None else profile, self.scenarios, source)

    def put(self, draft: Draft, values: Mapping[str, float]) -> None:
        for parameter in self.parameters:
            parameter.put(draft, values[parameter.name])

    @property
    def has_components(self) -> bool:
        """Whether the switch component run is among what it is fitted on."""
        return any(isinstance(target.source, ComponentSource) for target in self.fitted)

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        """Every run that a fitted number or an order needs, each once."""
        keys: dict[Experiment, None] = {}
        for target in self.fitted:
            if not isinstance(target.source, RunSource):
                continue
            keys[experiment(target.source)] = None
            if target.source.versus is not None:
                keys[Experiment(target.source.run, target.source.versus)] = None
        for order in self.orders:
            keys[order.below] = keys[order.above] = None
        return tuple(keys)


def published(
    groups: tuple[str, ...], errors: Mapping[str, float], weights: Mapping[str, float], absolute: Mapping[str, float] | None = None
) -> tuple[Fitted, ...]:
    """The results of the groups, as ``targets.yaml`` declares them.

    ``errors`` and ``weights`` go by the end of a number's place (``sct_p50_s``) or by the whole; the longest that fits counts.
    ``absolute`` gives misses of counts near zero in their own unit instead.
    """
    return tuple(_of_groups(groups, errors, weights, absolute or {}))


def _of_groups(
    groups: tuple[str, ...], errors: Mapping[str, float], weights: Mapping[str, float], absolute: Mapping[str, float]
) -> Iterator[Fitted]:
    for group, target in targets.load().targets():
        if group.name not in groups or not isinstance(target.by, Source) or not isinstance(target.value, int | float):
            continue
        size = _longest(absolute, target.at)
        yield Fitted(
            f"{group.name}/{target.at}", float(target.value), target.by, size if size is not None else _longest(errors, target.at) or 0.1,
            1.0 if (weight := _longest(weights, target.at)) is None else weight, size is not None, 1e3 if target.unit == "ms" else 1.0,
        )  # fmt: skip


def _longest(table: Mapping[str, float], place: str) -> float | None:
    fitting = [key for key in table if place.endswith(key)]
    return table[max(fitting, key=len)] if fitting else None
