"""Mooncake (Qin et al., FAST 2025, "A KVCache-centric Disaggregated Architecture for LLM Serving")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from talaria.policy.cost import Arrival
from talaria.policy.peers.base import PeerRouter


class Mooncake(PeerRouter):
    """``mooncake``: the KV object decides: the instance with the least estimated time to first token.

    Rule: TTFT = queue + fetching the cached prefix from where it is stored + prefill of the rest, on every instance; least wins.
    Storage is each instance's own host registry: KV is not moved between our instances, so a prefix that is elsewhere is prefilled
    anew. Models and switches have no say; a return waits for its model's next slot. Left out: early rejection (see the package)
    and separate instances for prefill and decode.
    """

    name: ClassVar[str] = "mooncake"

    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        return min(candidates, key=lambda i: self._ttft_s(arrival, i)), "ttft"

    def _ttft_s(self, arrival: Arrival, instance: int) -> float:
        terms = self._pricer.terms(arrival, instance)
        return self._queue_s(instance) + terms.kv_s + terms.prefill_s

    def _note(self, arrival: Arrival, instance: int) -> str:
        if not self._fleet.serves(instance, arrival.call.key.model):
            return ""
        return f"first token in {self._ttft_s(arrival, instance):.3f} s"
