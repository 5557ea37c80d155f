"""The cache-aware policy of SGLang's model gateway (docs.sglang.io, "SGLang Model Gateway", load balancing policies)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from talaria.policy.calls import LineKey
from talaria.policy.cost import Arrival
from talaria.policy.leases import reused_lines
from talaria.policy.peers.base import PeerRouter

CACHE_THRESHOLD: Final = 0.3
"""Least share of the prompt that must match (the gateway's default)."""
BALANCE_CALLS: Final = 64
BALANCE_RATIO: Final = 1.5
"""Loads further apart than both, difference and ratio, are out of balance (the gateway's defaults)."""


class SglangCacheAware(PeerRouter):
    """``sglang-cache-aware``: prefix match above a threshold, else the least loaded worker.

    Rule: where the busiest worker is out of balance with the idlest, the idlest; else the worker whose earlier prompts share the
    longest prefix, if that is more than ``CACHE_THRESHOLD`` of this one; else the one with the fewest calls. The match is what the
    gateway remembers of its own placements, not what a worker still holds. One policy serves one model: switches have no say, and
    a return waits for its model's next slot.
    """

    name: ClassVar[str] = "sglang-cache-aware"

    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        calls = [self._calls(i) for i in candidates]
        if max(calls) - min(calls) <= BALANCE_CALLS or max(calls) <= BALANCE_RATIO * min(calls):
            matched = {i: self._matched(arrival, i) for i in candidates}
            longest = max(candidates, key=lambda i: matched[i])
            if matched[longest] > CACHE_THRESHOLD:
                return longest, "prefix"
        return self._least_loaded(candidates), "pressure"

    def _matched(self, arrival: Arrival, instance: int) -> float:
        """Share of the prompt that was sent to the instance before."""
        key, most = arrival.call.key, 0
        for line, shared in reused_lines(arrival.call):
            entry = self._sessions.line(LineKey(key.tenant, key.session, key.model, line))
            if entry is not None and self._fleet.ids[instance] in entry.holders:
                most = max(most, shared)
        return most / arrival.call.prompt_tokens

    def _note(self, arrival: Arrival, instance: int) -> str:
        return f"{100 * self._matched(arrival, instance):.0f} % matched, {self._calls(instance)} calls"
