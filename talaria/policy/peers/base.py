"""What the rules of other systems have in common: they choose among the instances that may take a call now."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from talaria.policy.books import Decision, Router
from talaria.policy.cost import Arrival


class PeerRouter(Router):
    """A rule over candidates: those that serve the model, are healthy and have fresh telemetry, in order of instance."""

    def _decide(self, arrival: Arrival) -> Decision:
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None:
            return Decision(None, "")
        candidates = np.flatnonzero(self._fleet.takes_new(columns, arrival.now_s)).tolist()
        if not candidates:
            return Decision(None, "")
        chosen, reason = self._choose(arrival, candidates)
        return Decision(chosen, reason)

    @abstractmethod
    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        """One of ``candidates`` (never empty) and the reason in a word. Changes nothing."""

    def _calls(self, instance: int) -> int:
        """Calls there: queued, running, and on their way."""
        return self._fleet.seen_calls(instance) + self._overlay.total(self._fleet.ids[instance])[0]

    def _queue_s(self, instance: int) -> float:
        """Predicted seconds of the work that waits there for any model, switches included, and of what is on its way."""
        snapshot = self._fleet.snapshots[instance]
        assert snapshot is not None
        return snapshot.round_load_s + self._overlay.total(self._fleet.ids[instance])[1]

    def _least_loaded(self, candidates: Sequence[int]) -> int:
        """Fewest calls; the first of equals."""
        return min(candidates, key=self._calls)
