"""Why a call went where it went: candidates, cost terms, gates and the lease, as plain values built on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from talaria.policy.cost import CostTerms, Prefix


class Gate(NamedTuple):
    """One check of Algorithm 1 on one instance, with the two numbers (or words) that decided it."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance. ``terms`` is None where it does not serve the model; ``note`` is what a load-only router looks at."""

    instance: str
    terms: CostTerms | None
    prefix: Prefix
    gates: tuple[Gate, ...]
    note: str = ""

    @property
    def admissible(self) -> bool:
        """Whether every gate passed."""
        return all(gate.passed for gate in self.gates)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision on one call at ``now_s``. ``chosen`` is None where the overload policy keeps or refuses the call.

    ``reason`` is the placement's reason, or the overload action. ``lease`` says which lease was considered and why it
    was taken or discarded.
    """

    call_id: int
    model: str
    now_s: float
    candidates: tuple[Candidate, ...]
    lease: str
    chosen: str | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For a program: everything above as plain values, seconds and tokens."""
        return {
            "call_id": self.call_id,
            "model": self.model,
            "now_s": self.now_s,
            "chosen": self.chosen,
            "reason": self.reason,
            "lease": self.lease,
            "candidates": [_candidate_dict(candidate) for candidate in self.candidates],
        }

    def text(self) -> str:
        """For a terminal: one line per candidate, with the terms of Eq. 1 and the gates that failed."""
        where = self.chosen or "no instance"
        head = f"call {self.call_id} ({self.model}) at {self.now_s:.3f} s: {where} by {self.reason}; lease: {self.lease}"
        return "\n".join([head, *(_line(candidate, candidate.instance == self.chosen) for candidate in self.candidates)])


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    terms = candidate.terms
    return {
        "instance": candidate.instance,
        "cost_s": None if terms is None else terms.cost_s,
        "terms": None if terms is None else terms._asdict(),
        "prefix": {"tier": candidate.prefix.tier.value, "tokens": candidate.prefix.tokens},
        "gates": [gate._asdict() for gate in candidate.gates],
        "note": candidate.note,
    }


def _held(prefix: Prefix) -> str:
    return f"{prefix.tier.value} {prefix.tokens:,}" if prefix.tokens else "none here"


def _line(candidate: Candidate, chosen: bool) -> str:
    mark = "→" if chosen else " "
    failed = [f"{gate.name} ({gate.detail})" for gate in candidate.gates if not gate.passed]
    parts = [f"{mark} {candidate.instance}"]
    terms = candidate.terms
    if terms is not None:
        parts.append(
            f"cost {terms.cost_s:.3f} s = request {terms.request_s:.3f} (wait {terms.wait_s:.3f}, prefill {terms.prefill_s:.3f}, "
            f"decode {terms.decode_s:.3f}) + KV {terms.kv_s:.3f} ({_held(candidate.prefix)}) + activate {terms.activate_s:.3f}"
        )
    if candidate.note:
        parts.append(candidate.note)
    parts.append("all gates passed" if candidate.admissible else "failed: " + ", ".join(failed))
    return "  ".join(parts)
