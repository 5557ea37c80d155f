"""ServerlessLLM (Fu et al., OSDI 2024, "Low-Latency Serverless Inference for Large Language Models")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from talaria.policy.cost import Arrival
from talaria.policy.peers.base import PeerRouter


class ServerlessLlm(PeerRouter):
    """``serverlessllm``: the instance on which the model is estimated to start first.

    Rule: start-up time = what waits there before the model is loaded + its load from the tier that holds the weights (0 where it is
    active, the switch where it is parked, the full open otherwise). Calls are placed one by one: a return is a cold start like any
    other and waits for the next slot; where its KV lies has no say. Left out: live migration of running inferences.
    """

    name: ClassVar[str] = "serverlessllm"

    def _choose(self, arrival: Arrival, candidates: Sequence[int]) -> tuple[int, str]:
        return min(candidates, key=lambda i: self._startup_s(arrival, i)), "startup"

    def _startup_s(self, arrival: Arrival, instance: int) -> float:
        snapshot = self._fleet.snapshots[instance]
        assert snapshot is not None
        there = snapshot.models[arrival.call.key.model]
        slot_s = max(0.0, snapshot.time_s + there.next_slot_s - arrival.now_s)
        load = self._overlay.load(snapshot.instance, arrival.call.key.model)
        return slot_s + self._fleet.queued_s(instance, there, load) + there.activate_s

    def _note(self, arrival: Arrival, instance: int) -> str:
        if not self._fleet.serves(instance, arrival.call.key.model):
            return ""
        return f"starts in {self._startup_s(arrival, instance):.3f} s"
