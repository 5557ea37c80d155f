"""One unknown: its bounds, why they are plausible, and the places in profile and scenarios that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from studies.calibrate.draft import Draft, rounded

Place = Callable[[Draft, float], None]
Point = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Parameter:
    """``why`` says what bounds the value physically; ``start`` is tried first. ``whole``: counts, such as places in a pool."""

    name: str
    unit: str
    low: float
    high: float
    start: float
    why: str
    places: tuple[Place, ...]
    log: bool = False
    whole: bool = False

    def clip(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        return float(round(value)) if self.whole else rounded(value)

    def put(self, draft: Draft, value: float) -> None:
        for place in self.places:
            place(draft, value)

    def to_unit(self, value: float) -> float:
        """The value's place between its bounds, 0 to 1; logarithmic where ``log``."""
        if self.log:
            return float(np.log(value / self.low) / np.log(self.high / self.low))
        return (value - self.low) / (self.high - self.low)

    def from_unit(self, share: float) -> float:
        value = self.low * (self.high / self.low) ** share if self.log else self.low + share * (self.high - self.low)
        return self.clip(float(value))


def parameter(
    name: str, unit: str, bounds: tuple[float, float, float], why: str, *places: Place, log: bool = False, whole: bool = False
) -> Parameter:  # fmt: skip
    """``bounds``: the lowest value, where to start, the highest."""
    low, start, high = bounds
    return Parameter(name, unit, low, high, start, why, places, log, whole)


def values_at(parameters: Sequence[Parameter], point: Point) -> dict[str, float]:
    """Parameter values of a point in the unit cube."""
    return {parameter.name: parameter.from_unit(share) for parameter, share in zip(parameters, point.tolist(), strict=True)}


def hardware(field: str) -> Place:
    """A number of the profile's hardware."""
    return lambda draft, value: draft.set_quantity(draft.profile["hardware"], field, value)


def models(field: str, *names: str) -> Place:
    """The same number of the named models, or of all."""

    def place(draft: Draft, value: float) -> None:
        for name in names or draft.profile["models"]:
            draft.set_quantity(draft.profile["models"][name], field, value)

    return place


def knob(name: str, *scenario_names: str) -> Place:
    """A knob of the named scenarios, or of all."""
    return _scenario("knobs", name, scenario_names)


def workload(field: str, *scenario_names: str) -> Place:
    """A field of the workload's recipe."""
    return _scenario("workload", field, scenario_names)


def telemetry(field: str) -> Place:
    """How snapshots travel, in all scenarios."""
    return _scenario("telemetry", field, ())


def component(field: str) -> Place:
    """A setting of the switch component run."""

    def place(draft: Draft, value: float) -> None:
        draft.components[field] = value

    return place


def arrivals(form: str, *scenario_names: str) -> Place:
    """The arrival setting, such as ``closed_pool:{:g}``."""

    def place(draft: Draft, value: float) -> None:
        for name in scenario_names or draft.scenarios:
            draft.scenarios[name]["arrivals"] = form.format(value)

    return place


def _scenario(section: str, field: str, scenario_names: Sequence[str]) -> Place:
    def place(draft: Draft, value: float) -> None:
        for name in scenario_names or draft.scenarios:
            table: dict[str, Any] = draft.scenarios[name].setdefault(section, {})
            table[field] = value

    return place
