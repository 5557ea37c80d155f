"""Preble (Srivatsa et al., ICLR 2025, "Efficient Distributed Prompt Scheduling for LLM Serving")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final

from talaria.policy.books import Decision
from talaria.policy.cost import NO_PREFIX, Arrival, CostTerms, Prefix
from talaria.policy.peers.base import PeerRouter

HISTORY_S: Final = 180.0
"""Over how long placed work counts as an instance's load."""
REBALANCE_RATIO: Final = 2.0
"""How many times the lightest load, with this call there, an instance may carry and still be given calls for its prefixes."""


class Preble(PeerRouter):
    """``preble``: the E2 rule, exploitation of the longest cached prefix against exploration of the lightest load.

    Rule: where more of the prompt is cached somewhere than is not, the call goes to the longest cached prefix (the lighter load of
    equals), unless that instance carries more than ``REBALANCE_RATIO`` times the lightest load. Else it goes where load + its own
    prefill + the recomputation of what it evicts is least. Load is the predicted work placed there within ``HISTORY_S``. Models
    and switches have no say, and a return waits for its model's next slot. Left out: replication of hot prefixes by itself, which
    follows from exploration here, and the order within an instance, which is everybody's own.
    """

    name: ClassVar[str] = "preble"

    def _prepare(self) -> None:
        self._history: list[deque[tuple[float, float]]] = [deque() for _ in self._fleet.ids]
        """(time, predicted seconds) of placements, oldest first, per instance."""

    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        load_s = {i: self._load_s(i, arrival.now_s) for i in candidates}
        cached = {i: self._prefix(arrival, i).tokens for i in candidates}
        longest = max(cached.values())
        if longest > arrival.demand.prompt_tokens - longest:
            holder = min((i for i in candidates if cached[i] == longest), key=lambda i: load_s[i])
            if load_s[holder] <= REBALANCE_RATIO * min(load_s[i] + self._prefill_s(arrival, i) for i in candidates):
                return holder, "exploit"
        return min(candidates, key=lambda i: load_s[i] + self._prefill_s(arrival, i) + self._evicted_s(arrival, i)), "explore"

    def _placed(self, arrival: Arrival, decision: Decision, terms: CostTerms) -> None:
        if decision.instance is not None:
            self._history[decision.instance].append((arrival.now_s, terms.prefill_s + terms.kv_s + terms.decode_s))
            while self._history[decision.instance][0][0] <= arrival.now_s - HISTORY_S:
                self._history[decision.instance].popleft()

    def _prefix(self, arrival: Arrival, instance: int) -> Prefix:
        return arrival.held.get(instance, NO_PREFIX)

    def _load_s(self, instance: int, now_s: float) -> float:
        return sum(work_s for placed_s, work_s in self._history[instance] if placed_s > now_s - HISTORY_S)

    def _prefill_s(self, arrival: Arrival, instance: int) -> float:
        """Of what the instance does not hold."""
        terms = self._pricer.terms(arrival, instance)
        return terms.prefill_s + terms.kv_s

    def _evicted_s(self, arrival: Arrival, instance: int) -> float:
        """Recomputation of the prefixes that the call's KV would push out."""
        snapshot = self._fleet.snapshots[instance]
        assert snapshot is not None
        there = snapshot.models[arrival.call.key.model]
        over_tokens = arrival.demand.kv_tokens - self._prefix(arrival, instance).tokens - there.free_kv_tokens
        return max(0.0, over_tokens) * there.timing.prefill_s_per_token

    def _note(self, arrival: Arrival, instance: int) -> str:
        load_s = self._load_s(instance, arrival.now_s)
        return f"{self._prefix(arrival, instance).tokens} tokens cached, {load_s:.3f} s placed within {HISTORY_S:g} s"
