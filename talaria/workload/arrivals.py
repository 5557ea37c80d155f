"""How sessions get started: the source does not say, so it is a setting of every scenario (FIDELITY, "Arrivals").

One rule covers every kind: a session starts at its start time or when a place in the pool is free, whichever is later.
Open kinds have no pool; in a closed pool every start time is zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count, repeat
from typing import Any, ClassVar

import numpy as np

from talaria.errors import InputError, unknown_name
from talaria.workload.session import Session

SHUFFLE_WINDOW = 1024
"""Sessions that a closed pool looks ahead to mix the order: a full shuffle up to this many, bounded memory beyond."""


class Arrivals(ABC):
    """A pure description. ``rng`` is the run's own stream for arrivals."""

    __slots__ = ()
    kind: ClassVar[str]

    @property
    def pool(self) -> int | None:
        """The largest number of sessions live at once, ``None`` for no limit."""
        return None

    @abstractmethod
    def schedule(self, sessions: Iterable[Session], rng: np.random.Generator) -> Iterator[tuple[float, Session]]:
        """Lazily, each session with its start in seconds, in order of starting; starts never fall.

        Raises InputError where a kind needs what the sessions do not have.
        """


@dataclass(frozen=True, slots=True)
class ClosedPool(Arrivals):
    """``sessions`` run at once; when one ends the next starts. The order is a seeded shuffle: workloads list sessions
    issue by issue, each on every model in turn, and a pool in that order would keep the models in step."""

    kind = "closed_pool"
    sessions: int = 5

    @property
    def pool(self) -> int:
        return self.sessions

    def schedule(self, sessions: Iterable[Session], rng: np.random.Generator) -> Iterator[tuple[float, Session]]:
        waiting: list[Session] = []
        for session in sessions:
            waiting.append(session)
            if len(waiting) == SHUFFLE_WINDOW:
                yield 0.0, _take(waiting, rng)
        while waiting:
            yield 0.0, _take(waiting, rng)


def _take(waiting: list[Session], rng: np.random.Generator) -> Session:
    at = int(rng.integers(len(waiting)))
    waiting[at], waiting[-1] = waiting[-1], waiting[at]
    return waiting.pop()


class OpenArrivals(Arrivals):
    """Sessions start in the workload's order, at times that depend on nothing that happens in the run."""

    __slots__ = ()

    @abstractmethod
    def start_times(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds, endless, never falling."""

    def schedule(self, sessions: Iterable[Session], rng: np.random.Generator) -> Iterator[tuple[float, Session]]:
        return zip(self.start_times(rng), sessions, strict=False)


@dataclass(frozen=True, slots=True)
class Staggered(OpenArrivals):
    """Every ``interval_s`` seconds the next ``group`` sessions start; with as many as there are models, the next issue."""

    kind = "staggered"
    interval_s: float = 30.0
    group: int = 1

    def start_times(self, rng: np.random.Generator) -> Iterator[float]:
        return (self.interval_s * (number // self.group) for number in count())


@dataclass(frozen=True, slots=True)
class Poisson(OpenArrivals):
    """Independent users: exponential times between starts, ``rate_per_s`` sessions a second on average."""

    kind = "poisson"
    rate_per_s: float = 0.1

    def start_times(self, rng: np.random.Generator) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += rng.exponential(1.0 / self.rate_per_s)
            yield now_s


@dataclass(frozen=True, slots=True)
class AllAtOnce(OpenArrivals):
    """Every session starts at time zero."""

    kind = "all_at_once"

    def start_times(self, rng: np.random.Generator) -> Iterator[float]:
        return repeat(0.0)


@dataclass(frozen=True, slots=True)
class FromTrace(Arrivals):
    """Sessions start at their recorded times."""

    kind = "trace"

    def schedule(self, sessions: Iterable[Session], rng: np.random.Generator) -> Iterator[tuple[float, Session]]:
        for session in sessions:
            if session.start_s is None:
                raise InputError(
                    "arrivals 'trace' needs recorded times, and the trace has none",
                    where=f"session {session.id!r}",
                    fix="choose another kind, e.g. closed_pool:5",
                )
            yield session.start_s, session


KINDS: dict[str, type[Arrivals]] = {cls.kind: cls for cls in (ClosedPool, Staggered, Poisson, AllAtOnce, FromTrace)}


def parse(source: str | Mapping[str, Any], *, where: str = "arrivals") -> Arrivals:
    """Arrivals from ``kind[:value[:value]]`` (``closed_pool:5``, ``staggered:30:3``, ``poisson:0.5``) or a mapping with
    ``kind`` and the kind's own settings by name. Settings left out take their defaults.

    Raises InputError for an unknown kind or setting and for a value that is not a positive number.
    """
    if isinstance(source, str):
        name, *values = source.split(":")
        known = _settings(name, where)
        if len(values) > len(known):
            raise InputError(f"{source!r} has {len(values)} values", where=where, allowed=":".join([name, *known]))
        given: dict[str, Any] = dict(zip(known, values, strict=False))
    else:
        given = {key: value for key, value in source.items() if key != "kind"}
        name = str(source.get("kind", ""))
        known = _settings(name, where)
        for key in given:
            if key not in known:
                raise unknown_name("setting", str(key), known, where=f"{where} {name!r}")
    return KINDS[name](**{key: _positive(key, value, whole=known[key] is int, where=where) for key, value in given.items()})


def _settings(kind: str, where: str) -> dict[str, type]:
    """Name and type of the settings of ``kind``, in the order of its text form."""
    if kind not in KINDS:
        raise unknown_name("kind of arrivals", kind, KINDS, where=where)
    return {item.name: type(item.default) for item in fields(KINDS[kind])}  # type: ignore[arg-type]


def _positive(name: str, value: object, *, whole: bool, where: str) -> float:
    allowed = "a whole number of at least 1" if whole else "a number above 0"
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf or (whole and number != int(number)):
        raise InputError(f"{name} = {value!r}", where=where, allowed=allowed)
    return int(number) if whole else number
