"""What a study varies: knobs of the registry, and the number of instances where cost is weighed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from talaria.errors import InputError, unknown_name
from talaria.policy.knobs import BY_NAME, KnobError, parse_value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

INSTANCES = "instances"
"""Not a knob of the policies: how many instances the scenario has, its groups repeated in turn."""
MOST_INSTANCES = 1024
DIGITS = 3
"""Significant digits of a tuned number: more say nothing, and a policy file is read by people."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One varied knob. ``start``: where the search begins; ``low``/``high`` are inclusive; ``choices`` replaces them for a named choice."""

    name: str
    unit: str
    start: Any
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()
    whole: bool = False
    log: bool = False

    def distribution(self) -> BaseDistribution:
        """Where Optuna samples it from."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def used(self, sampled: Any) -> Any:
        """The value that is run and written for a sampled one: ``DIGITS`` significant digits, inside the range."""
        if self.choices or self.whole:
            return sampled
        return min(max(float(f"{sampled:.{DIGITS}g}"), self.low), self.high)

    def begun(self, value: Any) -> Dimension:
        """The same knob with the search beginning at ``value``, or at the end of the range that is nearest."""
        return replace(self, start=value if self.choices else min(max(value, self.low), self.high))

    def document(self) -> dict[str, Any]:
        """What identifies it in a study."""
        return {"choices": list(self.choices)} if self.choices else {"low": self.low, "high": self.high}


Space = Sequence[Dimension]


def parse_space(text: str, *, where: str = "--knobs") -> tuple[Dimension, ...]:
    """``tau,gamma=0.5:1,instances=1:8`` as dimensions. Without a range a knob takes the one that its sweep spans.

    Raises InputError that names the knob, what is allowed and the nearest name.
    """
    found: dict[str, Dimension] = {}
    for part in (part.strip() for part in text.split(",")):
        name, equals, span = (piece.strip() for piece in part.partition("="))
        if not name or (equals and not span):
            raise InputError(f"{part!r} names no knob", where=where, allowed="NAME or NAME=LOW:HIGH, separated by commas")
        if name in found:
            raise InputError(f"knob {name!r} is given twice", where=where, allowed="each knob once")
        found[name] = _instances(span, where) if name == INSTANCES else _of_knob(name, span, where)
    return tuple(found.values())


def _of_knob(name: str, span: str, where: str) -> Dimension:
    knob = BY_NAME.get(name)
    if knob is None:
        raise unknown_name("knob", name, [*BY_NAME, INSTANCES], where=where)
    if knob.choices:
        if span:
            raise InputError(f"{name} has no range", where=where, allowed=knob.allowed, fix=f"write {name} alone")
        choices = tuple(parse_value(name, choice) for choice in knob.choices)
        return Dimension(name, knob.unit, knob.default, choices=choices)
    whole = isinstance(knob.default, int)
    low, high = _range(name, span, where) if span else (min(*knob.sweep, knob.default), max(*knob.sweep, knob.default))
    try:
        low, high = parse_value(name, low), parse_value(name, high)
    except KnobError as error:
        raise InputError(f"{name}={span} is not allowed", where=where, allowed=f"a range within {error.allowed}") from None
    found = Dimension(name, knob.unit, knob.default, low, high, whole=whole, log=knob.log and low > 0)
    return found.begun(knob.default)


def _instances(span: str, where: str) -> Dimension:
    if not span:
        raise InputError("instances has no range of its own", where=where, fix="write for example instances=1:8")
    low, high = _range(INSTANCES, span, where)
    if not (low.is_integer() and high.is_integer() and low >= 1 and high <= MOST_INSTANCES):
        raise InputError(f"instances={span} is not allowed", where=where, allowed=f"whole numbers from 1 to {MOST_INSTANCES}")
    return Dimension(INSTANCES, "", int(high), low, high, whole=True)


def _range(name: str, span: str, where: str) -> tuple[float, float]:
    first, colon, last = span.partition(":")
    try:
        low, high = float(first), float(last)
    except ValueError:
        low, high = 1.0, 0.0
    if not (colon and low < high):
        raise InputError(f"{name}={span} is no range", where=where, allowed="NAME=LOW:HIGH with LOW below HIGH")
    return low, high
