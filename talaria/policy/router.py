"""Algorithm 1 and its simpler rivals behind one registry: which instance a call goes to (SPEC §3.2).

``full`` is the whole mechanism. The others share its books, its health rules and its overload policy, and each looks
at one thing only: load, the session's first instance, or the turn. Rules of other systems are in ``policy/peers``.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from talaria.policy.books import Decision, Routed, Router
from talaria.policy.cost import Arrival, Costs, CostTerms
from talaria.policy.explain import Gate
from talaria.policy.fleet import ModelColumns, Vector
from talaria.policy.knobs import Knobs
from talaria.policy.leases import Lease, LeaseCounts
from talaria.policy.overload import Overloaded
from talaria.policy.peers.aegaeon import Aegaeon
from talaria.policy.peers.cache_aware import SglangCacheAware
from talaria.policy.peers.continuum import Continuum
from talaria.policy.peers.mooncake import Mooncake
from talaria.policy.peers.preble import Preble
from talaria.policy.peers.serverlessllm import ServerlessLlm
from talaria.policy.replicas import DemandWindow, gain_s
from talaria.policy.sessions import Usage
from talaria.policy.snapshot import MISSING

__all__ = ["ROUTERS", "LeaseCounts", "Overloaded", "Routed", "Router", "Usage"]  # what a host needs


class ResidencyRouter(Router):
    """``full``: leases first, then Eq. 1 among the instances that pass the round, HBM and replica checks."""

    name: ClassVar[str] = "full"
    has_leases: ClassVar[bool] = True

    def _prepare(self) -> None:
        self._window = DemandWindow(self.knobs.control_window_s)

    def set_knobs(self, knobs: Knobs, now_s: float) -> None:
        super().set_knobs(knobs, now_s)
        self._window.window_s = knobs.control_window_s

    def _decide(self, arrival: Arrival) -> Decision:
        lease = self._leases.match(arrival.call, arrival.now_s)
        denied = ""
        if lease is not None:
            denied = self._denial(lease)
            if not denied:
                return Decision(self._fleet.index[lease.instance], "lease", lease)
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None:
            return Decision(None, "", lease, denied)
        costs = self._pricer.costs(arrival, columns)
        passes = self._passes(arrival, columns, costs)
        passes &= self._fleet.fresh_until_s >= arrival.now_s
        cheapest = int(np.where(passes, costs.cost_s, inf).argmin())
        return Decision(cheapest if passes[cheapest] else None, "cost", lease, denied)

    def _denial(self, lease: Lease) -> str:
        """Why a matching live lease cannot be honoured; empty if it can (Algorithm 1, step 1)."""
        i = self._fleet.index[lease.instance]
        snapshot = self._fleet.snapshots[i]
        if not self._fleet.healthy[i] or snapshot is None:
            return "the instance is unhealthy"
        if not self._fleet.serves(i, lease.key.model):
            return "the instance no longer serves the model"
        if snapshot.time_s <= lease.granted_s:
            return ""  # taken before the completion, it cannot know the prefix and so cannot deny it
        state = snapshot.lines.get(lease.key)
        if state is None or state.tier is MISSING or state.tokens <= 0:
            return "the prefix is neither on the device nor restorable"
        return ""

    def _passes(self, arrival: Arrival, columns: ModelColumns, costs: Costs) -> NDArray[np.bool_]:
        """Round admission, HBM, and the replica gate where one would have to be opened (Algorithm 1, step 2)."""
        passes: NDArray[np.bool_] = costs.round_s <= self._fleet.round_room_s
        passes &= columns.kv_room_tokens >= arrival.demand.kv_tokens
        if columns.closed:
            passes &= self._gain_s(arrival, costs.wait_s, columns.not_held) > columns.open_price_s
        return passes

    def _gain_s(self, arrival: Arrival, wait_s: Vector, not_held: Vector) -> Vector:
        best_held_wait_s = float(np.minimum.reduce(wait_s + not_held))
        return gain_s(self._demand_calls(arrival), best_held_wait_s, wait_s)

    def _demand_calls(self, arrival: Arrival) -> int:
        """Queued, spilled and leased demand over the next control window, this call included (Eq. 2)."""
        model = arrival.call.key.model
        recent = self._window.calls(model, arrival.now_s)
        return 1 + recent + self._queue.queued_of(model) + self._leases.live_of(model)

    def _placed(self, arrival: Arrival, decision: Decision, terms: CostTerms) -> None:
        if decision.reason == "spill" or (decision.reason != "lease" and terms.wait_s > 0.0):
            self._window.record(arrival.call.key.model, arrival.now_s)

    def _gates(self, arrival: Arrival, instance: int) -> tuple[Gate, ...]:
        gates = super()._gates(arrival, instance)
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None or not self._fleet.serves(instance, arrival.call.key.model):
            return gates
        costs = self._pricer.costs(arrival, columns)
        adds_s, room_s = costs.round_s[instance], self._fleet.round_room_s[instance]
        need, room = arrival.demand.kv_tokens, columns.kv_room_tokens[instance]
        gain, price_s = self._gain_s(arrival, costs.wait_s, columns.not_held)[instance], columns.open_price_s[instance]
        gate = "no replica to open" if price_s == -inf else f"gain {gain:.3f} s against a price of {price_s:.3f} s"
        return (
            *gates,
            Gate("round", bool(adds_s <= room_s), f"adds {adds_s:.3f} s to a round with {room_s:.3f} s of room"),
            Gate("hbm", bool(room >= need), f"needs {need:.0f} KV tokens of {room:.0f}"),
            Gate("replica", bool(gain > price_s), gate),
        )


class LeastPressure(Router):
    """``least-pressure``: fewest calls queued, running or on their way, plus round load. No model, no KV, no lease."""

    name: ClassVar[str] = "least-pressure"

    def _decide(self, arrival: Arrival) -> Decision:
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None:
            return Decision(None, "")
        takes = self._fleet.takes_new(columns, arrival.now_s)
        least = int(np.where(takes, self._fleet.pressure, inf).argmin())
        return Decision(least if takes[least] else None, "pressure")

    def _note(self, arrival: Arrival, instance: int) -> str:
        return f"pressure {self._fleet.pressure[instance]:.3f}"


class RoundRobin(Router):
    """``round-robin``: the next instance in order that may take new placements."""

    name: ClassVar[str] = "round-robin"

    def _prepare(self) -> None:
        self._next = 0

    def _decide(self, arrival: Arrival) -> Decision:
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None:
            return Decision(None, "")
        able = np.flatnonzero(self._fleet.takes_new(columns, arrival.now_s))
        if not able.size:
            return Decision(None, "")
        at = int(np.searchsorted(able, self._next))
        return Decision(int(able[at % able.size]), "rotation")

    def _placed(self, arrival: Arrival, decision: Decision, terms: CostTerms) -> None:
        if decision.instance is not None:
            self._next = (decision.instance + 1) % len(self._fleet.ids)

    def _note(self, arrival: Arrival, instance: int) -> str:
        return "next in turn" if instance == self._next else ""


class SessionSticky(LeastPressure):
    """``session-sticky``: a session stays on its first instance while that is healthy; knob ``sticky_start`` says which that is."""

    name: ClassVar[str] = "session-sticky"

    def _decide(self, arrival: Arrival) -> Decision:
        home = self._sessions.home(arrival.call.key)
        if home is not None:
            i = self._fleet.index[home]
            if self._fleet.healthy[i] and self._fleet.serves(i, arrival.call.key.model):
                return Decision(i, "sticky")
        decision = self._cheapest(arrival) if self.knobs.sticky_start == "cost" else super()._decide(arrival)
        return decision._replace(reason="health") if home is not None else decision

    def _cheapest(self, arrival: Arrival) -> Decision:
        """Eq. 1 alone, without the checks of Algorithm 1: this router has neither leases nor gates."""
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None:
            return Decision(None, "")
        takes = self._fleet.takes_new(columns, arrival.now_s)
        cheapest = int(np.where(takes, self._pricer.costs(arrival, columns).cost_s, inf).argmin())
        return Decision(cheapest if takes[cheapest] else None, "cost")

    def _placed(self, arrival: Arrival, decision: Decision, terms: CostTerms) -> None:
        if decision.instance is not None:
            self._sessions.move_home(arrival.call.key, self._fleet.ids[decision.instance], arrival.now_s)

    def _note(self, arrival: Arrival, instance: int) -> str:
        home = self._sessions.home(arrival.call.key)
        return "home of the session" if home == self._fleet.ids[instance] else super()._note(arrival, instance)


ROUTERS: dict[str, type[Router]] = {
    cls.name: cls
    for cls in (
        ResidencyRouter, LeastPressure, SessionSticky, RoundRobin,
        Aegaeon, ServerlessLlm, Preble, Mooncake, Continuum, SglangCacheAware,
    )
}  # fmt: skip
"""Every router by its name in a config."""
