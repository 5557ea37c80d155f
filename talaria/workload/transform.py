"""Workloads made from workloads: mapped onto other models, thinned, sped up or slowed down, without reading them first.

Every function here returns a lazy ``Workload`` over the one it is given; they compose in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

from talaria.errors import InputError, unknown_name
from talaria.workload.rules import by_calls
from talaria.workload.session import Session, TraceCall, Workload

Change = Callable[[Iterator[Session]], Iterator[Session]]


class Transformed:
    """``base`` with its stream of sessions passed through ``change``."""

    def __init__(self, base: Workload, change: Change, *, keeps_models: bool) -> None:
        self.name, self.block_tokens, self.block_scope = base.name, base.block_tokens, base.block_scope
        self._base, self._change, self._keeps_models = base, change, keeps_models

    def models(self) -> tuple[str, ...]:
        """As the protocol says; reads through all sessions where the change can alter the order."""
        if self._keeps_models:
            return self._base.models()
        return tuple(by_calls(Counter(call.model for session in self.sessions() for call in session.calls)))

    def sessions(self) -> Iterator[Session]:
        return self._change(self._base.sessions())


# --- models -------------------------------------------------------------------------------------------------------


def assign_models(workload: Workload, targets: Sequence[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which of ``targets`` (a scenario's models, not empty) serves each model of ``workload``: a complete mapping.

    ``given`` entries hold; a model that is itself a target keeps its name; the others, by falling number of calls, take
    the targets that are still unused in turn (all targets, if none is).
    Raises InputError for an entry of ``given`` with a model that the workload or the scenario does not have.
    """
    sources, given = workload.models(), given or {}
    for source, target in given.items():
        if source not in sources:
            raise unknown_name("model of the trace", source, sources, where=f"--map {source}={target}")
        if target not in targets:
            raise unknown_name("model of the scenario", target, targets, where=f"--map {source}={target}")
    mapping = {source: given.get(source, source) for source in sources if source in given or source in targets}
    used = set(mapping.values())
    free = cycle([target for target in targets if target not in used] or targets)
    return {source: mapping[source] if source in mapping else next(free) for source in sources}


def map_models(workload: Workload, mapping: Mapping[str, str]) -> Workload:
    """Calls of model ``source`` become calls of ``mapping[source]``; models that it does not name stay."""
    if all(source == target for source, target in mapping.items()):
        return workload
    return Transformed(workload, partial(_each_call, partial(_renamed, dict(mapping))), keeps_models=False)


def _renamed(mapping: dict[str, str], call: TraceCall) -> TraceCall:
    target = mapping.get(call.model, call.model)
    return call if target == call.model else replace(call, model=target)


def _each_call(change: Callable[[TraceCall], TraceCall], sessions: Iterator[Session]) -> Iterator[Session]:
    for session in sessions:
        yield replace(session, calls=tuple(map(change, session.calls)))


# --- time ---------------------------------------------------------------------------------------------------------


def cap_gaps(workload: Workload, cap_s: float) -> Workload:
    """No gap is longer than ``cap_s``: a replay does not wait out a user's lunch (SPEC §6: 10 s)."""
    _check("gap_cap_s", cap_s)
    return Transformed(workload, partial(_each_call, partial(_capped, cap_s)), keeps_models=True)


def _capped(cap_s: float, call: TraceCall) -> TraceCall:
    return replace(call, gap_s=cap_s) if call.gap_s > cap_s else call


def scale_gaps(workload: Workload, factor: float) -> Workload:
    """Tools and agents that take ``factor`` times as long between calls."""
    _check("gap_scale", factor)
    return Transformed(workload, partial(_each_call, partial(_slowed, factor)), keeps_models=True)


def _slowed(factor: float, call: TraceCall) -> TraceCall:
    return replace(call, gap_s=call.gap_s * factor)


def scale_rate(workload: Workload, factor: float) -> Workload:
    """``factor`` times as many session starts per second: recorded start times are divided by it, gaps stay."""
    _check("rate_scale", factor)
    return Transformed(workload, partial(_at_rate, factor), keeps_models=True)


def _at_rate(factor: float, sessions: Iterator[Session]) -> Iterator[Session]:
    for session in sessions:
        yield replace(session, start_s=_start_s(session, "rate_scale") / factor)


def _start_s(session: Session, option: str) -> float:
    if session.start_s is None:
        raise InputError(f"{option} needs recorded start times, and session {session.id!r} has none", fix=f"leave out {option}")
    return session.start_s


def _check(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise InputError(f"{option} = {value!r}", allowed="a number above 0")


def _check_whole(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{option} = {value!r}", allowed="a whole number of at least 1")


# --- subsets ------------------------------------------------------------------------------------------------------


def first_sessions(workload: Workload, count: int) -> Workload:
    """The first ``count`` sessions."""
    _check_whole("first_sessions", count)
    return Transformed(workload, partial(_first, count), keeps_models=False)


def _first(count: int, sessions: Iterator[Session]) -> Iterator[Session]:
    return islice(sessions, count)


def first_calls(workload: Workload, count: int) -> Workload:
    """Sessions up to ``count`` calls in all; the last one is cut short."""
    _check_whole("first_calls", count)
    return Transformed(workload, partial(_until, count), keeps_models=False)


def _until(count: int, sessions: Iterator[Session]) -> Iterator[Session]:
    for session in sessions:
        yield session if len(session.calls) <= count else replace(session, calls=session.calls[:count])
        count -= len(session.calls)
        if count <= 0:
            return


def within(workload: Workload, start_s: float, end_s: float) -> Workload:
    """Sessions that start in [``start_s``, ``end_s``), their times counted from ``start_s``."""
    if not 0.0 <= start_s < end_s:
        raise InputError(f"window_s = [{start_s!r}, {end_s!r}]", allowed="0 <= start < end")
    return Transformed(workload, partial(_within, start_s, end_s), keeps_models=False)


def _within(start_s: float, end_s: float, sessions: Iterator[Session]) -> Iterator[Session]:
    for session in sessions:
        at_s = _start_s(session, "window_s")
        if at_s >= end_s:
            return
        if at_s >= start_s:
            yield replace(session, start_s=at_s - start_s)


def only_models(workload: Workload, models: Collection[str]) -> Workload:
    """Only the calls of ``models``; sessions that keep none are left out.

    What waited for a call that is gone waits for what that one waited for, and its gap is added: the client's own
    time still passes, the model's does not. Raises InputError for a model that the workload does not have.
    """
    known = workload.models()
    for model in models:
        if model not in known:
            raise unknown_name("model of the trace", model, known, where="only_models")
    return Transformed(workload, partial(_with_models, frozenset(models)), keeps_models=False)


def _with_models(models: frozenset[str], sessions: Iterator[Session]) -> Iterator[Session]:
    for session in sessions:
        kept = _keep(session.calls, models)
        if kept:
            yield replace(session, calls=kept)


def _keep(calls: tuple[TraceCall, ...], models: frozenset[str]) -> tuple[TraceCall, ...]:
    kept: list[TraceCall] = []
    # For each old call, what stands in its place: the kept calls to wait for, and client time still to pass after them.
    places: list[tuple[tuple[int, ...], float]] = []
    for call in calls:
        before = [places[index] for index in call.waits_for]
        waits_for = tuple(sorted({index for indices, _ in before for index in indices}))
        gap_s = call.gap_s + max((left_s for _, left_s in before), default=0.0)
        if call.model not in models:
            places.append((waits_for, gap_s))
            continue
        places.append(((len(kept),), 0.0))
        reuse_of, reuse_tokens = call.reuse_of, call.reuse_tokens
        if reuse_of is not None:
            # The KV of another model is of no use, so nothing is lost with the link to a call that is gone.
            reuse_of, reuse_tokens = (places[reuse_of][0][0], reuse_tokens) if calls[reuse_of].model in models else (None, 0)
        spawned_by = None if call.spawned_by is None else max(places[call.spawned_by][0], default=None)
        kept.append(replace(call, waits_for=waits_for, gap_s=gap_s, spawned_by=spawned_by, reuse_of=reuse_of, reuse_tokens=reuse_tokens))
    return tuple(kept)
