"""Replays a decision log: the same inputs go through the policies again, and every answer must be the one that was logged.

Zero differences for a log that the GPU backend wrote prove that both worlds run one policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from talaria.errors import InputError, unknown_name
from talaria.policy.codec import CODEC, CodecError, Json
from talaria.policy.router import ROUTERS, LeaseCounts, Router
from talaria.policy.slots import SlotScheduler
from talaria.report.declog import SCHEMA, read_log

KEPT = 5
"""How many differences are kept to be shown; all are counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One decision that came out differently: where in the log, who decided, and both answers as the log writes them."""

    line: int
    who: str
    now_s: float
    logged: str
    replayed: str


@dataclass(slots=True)
class Differences:
    """What a replay found. ``first`` holds the first ``KEPT`` of ``count``; ``leases`` is how the replayed router's leases ended."""

    leases: LeaseCounts
    decisions: int = 0
    count: int = 0
    first: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference) -> None:
        self.count += 1
        if len(self.first) < KEPT:
            self.first.append(difference)


class _Broken(Exception):
    """A record that cannot be fed to a policy."""


@dataclass(frozen=True, slots=True)
class _Policies:
    """The policies that a log's header describes."""

    router: Router
    slots: dict[str, SlotScheduler]

    @classmethod
    def build(cls, header: Json) -> _Policies:
        router = header["router"]
        if router["name"] not in ROUTERS:
            raise unknown_name("router", str(router["name"]), ROUTERS)
        slots = {instance: SlotScheduler(**_decode_arguments(arguments)) for instance, arguments in header["slots"].items()}
        return cls(ROUTERS[router["name"]](**_decode_arguments(router["arguments"])), slots)

    def decision(self, record: Json) -> tuple[str, Json, Callable[[], Json]]:
        """Who decides in this record, the logged answer, and a function that decides again."""
        match record:
            case {"who": "router", "do": str(method), "now_s": int() | float(), "args": list(encoded), "out": logged}:
                decide = getattr(self.router, method, None)
                if method.startswith("_") or not callable(decide):
                    raise _Broken(f"the router cannot {method!r}")
                arguments = CODEC.decode(encoded)
                return f"router {method}", logged, lambda: CODEC.encode(decide(*arguments))
            case {"who": "slots", "instance": str(instance), "now_s": int() | float() as now_s, "commands": logged, **inputs}:
                if instance not in self.slots:
                    raise unknown_name("instance", instance, self.slots)
                return f"slots of {instance}", logged, _step(self.slots[instance], inputs, now_s)
            case _:
                raise _Broken("is no record of a router or slots decision")


def _step(slots: SlotScheduler, inputs: Json, now_s: float) -> Callable[[], Json]:
    """What a slots record tells the scheduler: other knobs, which it answers with nothing, or an event."""
    knobs, event, view = (CODEC.decode(inputs.get(name)) for name in ("knobs", "event", "view"))

    def decide() -> Json:
        if knobs is None:
            return [CODEC.encode(command) for command in slots.step(event, view, now_s)]
        slots.set_knobs(knobs)
        return []

    return decide


def replay(path: Path, on_decision: Callable[[], None] = lambda: None) -> Differences:
    """Feed the log's inputs through freshly built policies; ``on_decision`` is called after each.

    Raises InputError with file and line if the log is unreadable, of another schema, or holds a record that no policy takes.
    A policy that raises on a well-formed input counts as a difference and ends the replay: nothing after it can be compared.
    """
    lines = read_log(path)
    policies = _opened(path, next(lines, None))
    found = Differences(policies.router.lease_counts)
    for number, record in lines:
        try:
            who, logged, decide = policies.decision(record)
        except (_Broken, CodecError, InputError) as error:
            raise InputError(str(error), where=f"{path}:{number}", fix="write the log again with this version") from None
        found.decisions += 1
        try:
            replayed = decide()
        except Exception as error:
            found.add(Difference(number, who, record["now_s"], _short(logged), f"raised {type(error).__name__}: {error}"))
            break
        if replayed != logged:
            found.add(Difference(number, who, record["now_s"], _short(logged), _short(replayed)))
        on_decision()
    return found


def _opened(path: Path, first: tuple[int, Json] | None) -> _Policies:
    where = f"{path}:1"
    if first is None:
        raise InputError("the decision log is empty", where=str(path), allowed=f"a header of schema {SCHEMA}, then records")
    header = first[1]
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else header
        raise InputError(f"schema is {found!r:.60}", where=where, allowed=SCHEMA)
    try:
        return _Policies.build(header)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"the header does not describe the policies: {error}"
        raise InputError(what, where=where, fix="write the log again with this version") from None
    except InputError as error:
        raise InputError(error.what, where=where, allowed=error.allowed, fix=error.fix) from None


def _decode_arguments(arguments: dict[str, Json]) -> dict[str, Any]:
    return {name: CODEC.decode(value) for name, value in arguments.items()}


def _short(document: Json) -> str:
    text = json.dumps(document, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"
