"""Aegaeon (Xiang et al., SOSP 2025, "Effective GPU Pooling for Concurrent LLM Serving on the Market")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from talaria.policy.cost import Arrival
from talaria.policy.peers.base import PeerRouter

GROUP_CALLS: Final = 8
"""Most prefills of one model that are served together before the instance turns to another model."""


class Aegaeon(PeerRouter):
    """``aegaeon``: grouped first-come first-served prefill over models that take turns at token granularity.

    Rule: a call joins the group of its model that waits on some instance, so that one switch serves several prefills, while the
    group has fewer than ``GROUP_CALLS``; else it opens a group where the queue, switches included, is shortest. Neither session
    nor KV has a say, and a return waits for its model's next slot (no session-prefill). Left out: separate instances for prefill
    and decode, since ours do both.
    """

    name: ClassVar[str] = "aegaeon"

    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        model = arrival.call.key.model
        for i in candidates:
            if 0 < self._group(i, model) < GROUP_CALLS:
                return i, "group"
        return min(candidates, key=self._queue_s), "backlog"

    def _group(self, instance: int, model: str) -> int:
        """Calls of the model that wait on the instance or are on their way to it."""
        snapshot = self._fleet.snapshots[instance]
        assert snapshot is not None
        return snapshot.models[model].queued + self._overlay.load(snapshot.instance, model).calls

    def _note(self, arrival: Arrival, instance: int) -> str:
        if not self._fleet.serves(instance, arrival.call.key.model):
            return ""
        return f"group of {self._group(instance, arrival.call.key.model)}, queue {self._queue_s(instance):.3f} s"
