"""Continuum (Li et al., arXiv 2511.02230, "Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live")."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, Final

from talaria.policy.books import Decision
from talaria.policy.calls import Call
from talaria.policy.cost import Arrival, CostTerms
from talaria.policy.peers.base import PeerRouter

GAPS_KEPT: Final = 256
FEWEST_GAPS: Final = 10
"""Before so many returns were seen, the time to live is the knob tau."""


class Continuum(PeerRouter):
    """``continuum``: the KV of a call that will return is kept for a time that is computed for it.

    Rule: at a completion choose the time to live t that maximises P(gap <= t) x benefit - E[min(gap, t)] x rate, over the gaps seen
    of late. Benefit: reloading the KV plus half a round of waiting in line again. Rate: the KV's share of the instance's room, for
    every call that waits there. Within its time to live a return goes back and joins the open slot (session-prefill, its place in
    the line kept); later, and at first, a call goes to the fewest calls. Models and switches have no say. Left out: pinning; as
    with our own leases, a time to live is a reservation.
    """

    name: ClassVar[str] = "continuum"
    has_leases: ClassVar[bool] = True

    def _prepare(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=GAPS_KEPT)
        """Between a completion and the line's next call, newest last."""

    def _decide(self, arrival: Arrival) -> Decision:
        lease = self._leases.match(arrival.call, arrival.now_s)
        if lease is None:
            return super()._decide(arrival)
        i = self._fleet.index[lease.instance]
        if self._fleet.healthy[i] and self._fleet.serves(i, lease.key.model):
            return Decision(i, "lease", lease)
        return super()._decide(arrival)._replace(lease=lease, denied="the instance is unhealthy or no longer serves the model")

    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        return self._least_loaded(candidates), "pressure"

    def _placed(self, arrival: Arrival, decision: Decision, terms: CostTerms) -> None:
        line = self._sessions.line(arrival.call.key)
        if line is not None and line.completed_on is not None and arrival.call.is_return:
            self._gaps_s.append(arrival.now_s - line.completed_s)

    def _reserve_s(self, call: Call, instance: str, kv_tokens: int) -> float:
        snapshot = self._fleet.snapshots[self._fleet.index[instance]]
        if snapshot is None or call.key.model not in snapshot.models or len(self._gaps_s) < FEWEST_GAPS:
            return self.knobs.tau_s
        there = snapshot.models[call.key.model]
        timing = there.timing
        reload_s = timing.restore_s(kv_tokens) if snapshot.capabilities.hkvr else timing.prefill_s(0, 0, kv_tokens)
        waiting = sum(model.queued for model in snapshot.models.values())
        rate = waiting * kv_tokens / (kv_tokens + there.free_kv_tokens)
        return best_time_to_live_s(sorted(self._gaps_s), reload_s + 0.5 * snapshot.round_load_s, rate)

    def _note(self, arrival: Arrival, instance: int) -> str:
        return f"{self._calls(instance)} calls"


def best_time_to_live_s(gaps_s: Sequence[float], benefit_s: float, rate: float) -> float:
    """The t among 0 and the ascending ``gaps_s`` with the largest P(gap <= t)·``benefit_s`` - E[min(gap, t)]·``rate``; the least of equals.

    Between two gaps the cost rises and the benefit does not, so no other t can be better. A lease ends at its expiry, which
    its return must not meet: t is just beyond its gap.
    """
    best_s, most = 0.0, 0.0
    for count, (gap_s, sum_s) in enumerate(zip(gaps_s, accumulate(gaps_s), strict=True), start=1):
        held_s = sum_s + gap_s * (len(gaps_s) - count)
        utility = (count * benefit_s - held_s * rate) / len(gaps_s)
        if utility > most:
            best_s, most = gap_s * (1.0 + 1e-9) + 1e-9, utility
    return best_s
