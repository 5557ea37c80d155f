"""Eq. 1 against what happened: for every call of a real run, each term as the router predicted it, and as it came (SPEC §3.3).

Happened: ``activate`` is the time of switches and opens to the call's model between its placement and its admission, ``request`` the
rest of the wait, the prefill of the suffix and the decode, ``kv`` the share of the prefill that recomputed a lost prefix. A call's way to
its engine and back (``call_overhead_s`` of a profile) is the same everywhere and no term of Eq. 1: it stands in ``request`` as it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from talaria.gpu.validation.joined import CallKey, session_names
from talaria.policy.calls import Call
from talaria.policy.codec import CODEC
from talaria.policy.cost import CostTerms
from talaria.policy.explain import Explanation
from talaria.report.declog import read_log
from talaria.report.measured import COMPLETED
from talaria.report.record import RunRecord

ROUNDING_S = 1e-4
TERMS = ("request", "kv", "activate")
SAME_MOMENT_S = 0.05
"""So much later than it was explained a placement may stand in a record. Those of one model are in the same order on both sides."""


class Terms(NamedTuple):
    """Seconds."""

    request: float
    kv: float
    activate: float


class TermPair(NamedTuple):
    key: CallKey
    predicted: Terms
    happened: Terms

    @property
    def worst(self) -> str:
        """The term that was furthest off."""
        return max(TERMS, key=lambda name: abs(getattr(self.predicted, name) - getattr(self.happened, name)))


@dataclass(frozen=True, slots=True)
class TermErrors:
    """One term over all calls: predicted less happened, in seconds. ``worst_of``: calls whose furthest-off term it was."""

    predicted_mean_s: float
    happened_mean_s: float
    bias_s: float
    mae_s: float
    worst_of: int


def pairs(log: Path, record: RunRecord, began_s: float) -> list[TermPair]:
    """Every completed call of ``record`` whose placement ``log`` explains. Raises InputError where the log cannot be read.

    A gateway names sessions and lines in its own way, so a call is known by its model and the time of its placement; ``began_s`` is
    the log's time at the record's beginning. A call that had to queue was not placed when it was explained, and is left out.
    """
    predictions: dict[str, deque[tuple[float, CostTerms]]] = {}
    for call, explanation in _explained(log):
        chosen = next((item.terms for item in explanation.candidates if item.instance == explanation.chosen), None)
        if chosen is not None:
            predictions.setdefault(call.key.model, deque()).append((explanation.now_s - began_s, chosen))
    names, found, switches = session_names(record), [], _Switches(record)
    order = np.argsort(record.calls["enqueued_s"] + record.calls["placed_s"], kind="stable")
    columns = {name: record.calls[name][order].tolist() for name in record.calls.names}
    for row in zip(*columns.values(), strict=True):
        call_row = dict(zip(columns, row, strict=True))
        terms = _placed_at(predictions.get(record.models[call_row["model"]]), call_row["enqueued_s"] + call_row["placed_s"])
        if terms is not None and call_row["outcome"] == COMPLETED:
            key = CallKey(names[call_row["session"]], call_row["line"], call_row["turn"])
            found.append(TermPair(key, Terms(terms.request_s, terms.kv_s, terms.activate_s), _happened(call_row, switches)))
    return found


def _placed_at(waiting: deque[tuple[float, CostTerms]] | None, time_s: float) -> CostTerms | None:
    """The next prediction, if it is of that time; earlier ones belong to calls that are in no row, and are dropped."""
    while waiting and waiting[0][0] < time_s - SAME_MOMENT_S:
        waiting.popleft()
    return waiting.popleft()[1] if waiting and waiting[0][0] < time_s + ROUNDING_S else None


def summary(found: list[TermPair]) -> dict[str, TermErrors]:
    """By term; empty without calls."""
    if not found:
        return {}
    predicted, happened = (np.array([getattr(pair, side) for pair in found]) for side in ("predicted", "happened"))
    worst = [pair.worst for pair in found]
    return {
        name: TermErrors(
            float(predicted[:, at].mean()), float(happened[:, at].mean()), float((predicted - happened)[:, at].mean()),
            float(np.abs(predicted - happened)[:, at].mean()), worst.count(name),
        )
        for at, name in enumerate(TERMS)
    }  # fmt: skip


def _explained(log: Path) -> Iterator[tuple[Call, Explanation]]:
    for _, record in read_log(log):
        if record.get("do") == "explain":
            yield CODEC.decode(record["args"])[0], CODEC.decode(record["out"])


class _Switches:
    """When each instance was on its way to each model."""

    def __init__(self, record: RunRecord) -> None:
        self._spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
        columns = (record.switches[name].tolist() for name in ("instance", "target", "started_s", "total_s"))
        for instance, target, started_s, total_s in zip(*columns, strict=True):
            self._spans.setdefault((instance, target), []).append((started_s, started_s + total_s))

    def overlap_s(self, instance: int, model: int, begin_s: float, end_s: float) -> float:
        spans = self._spans.get((instance, model), ())
        return sum(max(0.0, min(end_s, high) - max(begin_s, low)) for low, high in spans)


def _happened(call: dict[str, float], switches: _Switches) -> Terms:
    placed_s, admitted_s = (call["enqueued_s"] + call[name] for name in ("placed_s", "admitted_s"))
    activate_s = switches.overlap_s(int(call["instance"]), int(call["model"]), placed_s, admitted_s)
    prefill_s = call["ttft_s"] - call["admitted_s"]
    computed = call["prompt_tokens"] - call["device_tokens"] - call["host_tokens"]
    kv_s = prefill_s * call["recomputed_tokens"] / max(computed, 1)
    return Terms(call["e2e_s"] - call["placed_s"] - activate_s - kv_s, kv_s, activate_s)
