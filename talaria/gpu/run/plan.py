"""A replay, resolved before anything is sent: which trace, on which models, under which policies, how often."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria.errors import InputError
from talaria.policy.knobs import Knobs, as_dict
from talaria.workload.arrivals import parse as parse_arrivals
from talaria.workload.open import open_workload
from talaria.workload.session import Workload
from talaria.workload.transform import assign_models, map_models

POOL = "closed_pool:5"
"""How the sessions of a trace without times arrive, unless said otherwise."""


@dataclass(frozen=True, slots=True)
class Case:
    """One policy. ``directory``: where its run directory shall appear, if anywhere; of a comparison they appear together."""

    label: str
    router: str
    session_prefill: bool
    knobs: Knobs
    directory: Path | None = None

    def document(self) -> dict[str, Any]:
        return {"router": self.router, "session_prefill": self.session_prefill, "knobs": as_dict(self.knobs)}


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """``source`` is what ``open_workload`` takes; ``notes`` are said to the user once."""

    source: Mapping[str, Any]
    mapping: Mapping[str, str]
    arrivals: str
    gap_cap_s: float | None
    seeds: Sequence[int]
    notes: Sequence[str]
    content: str = ""
    """SHA-256 of the trace file: a trace of the same name may be another one."""

    def workload(self) -> Workload:
        """The trace on the served models."""
        return map_models(open_workload(self.source, 0), self.mapping)

    def document(self) -> dict[str, Any]:
        """What a run document says of its work."""
        return {"workload": dict(self.source), "models": dict(self.mapping), "arrivals": self.arrivals, "gap_cap_s": self.gap_cap_s}


def plan(
    trace: Path, served: Mapping[str, int | None], *, mapping: Mapping[str, str], arrivals: str | None, gap_cap_s: float | None,
    seeds: Sequence[int],
) -> ReplayPlan:  # fmt: skip
    """``served`` has the most tokens of prompt and output together that each model takes, None where it is not known.

    Raises InputError for a bad trace, an unknown model, arrivals that the trace cannot give, and a call that its model cannot take.
    """
    source = {"trace": str(trace)}
    workload = open_workload(source, 0, where="--trace")
    assigned = assign_models(workload, list(served), mapping)
    notes = ["models: " + ", ".join(f"{given} -> {taken}" for given, taken in assigned.items())]
    first = next(iter(workload.sessions()), None)
    kind = arrivals
    if kind is None:
        kind = "trace" if first is not None and first.start_s is not None else POOL
        if kind == POOL:
            notes.append(f"{trace} has no times: sessions arrive as {kind}")
    parse_arrivals(kind, where="--arrivals")
    if gap_cap_s is not None:
        notes.append(f"gaps are capped at {gap_cap_s:g} s")
    with trace.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    planned = ReplayPlan(source, assigned, kind, gap_cap_s, seeds, notes, content)
    _check_lengths(planned.workload(), served, str(trace))
    return planned


def _check_lengths(workload: Workload, served: Mapping[str, int | None], where: str) -> None:
    for session in workload.sessions():
        for number, call in enumerate(session.calls):
            most = served[call.model]
            if most is not None and call.prompt_tokens + call.output_tokens > most:
                raise InputError(
                    f"a call of {call.prompt_tokens:,} + {call.output_tokens:,} tokens on {call.model}",
                    where=f"{where}: session {session.id!r} call {number}", allowed=f"at most {most:,} tokens together",
                    fix="map it to a model with a longer context, or serve this one with more",
                )  # fmt: skip
