"""Eq. 1: what a call costs on an instance, in seconds, each effect charged once (SPEC §3.3).

The same price exists twice: ``terms`` for one instance, with the prefix it holds, and ``Pricer`` for all instances at
once, as if none held a prefix; a placement patches the few that do with ``terms``. A test keeps the two equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from talaria.policy.calls import Call, LineKey
from talaria.policy.fleet import FEATURES, Fleet, ModelColumns, Vector, in_round
from talaria.policy.leases import reused_lines
from talaria.policy.sessions import SessionTable
from talaria.policy.snapshot import ACTIVE, DEVICE, HOST, MISSING, Tier


class Prefix(NamedTuple):
    """The part of a call's reusable prefix that an instance holds."""

    tier: Tier
    tokens: int


NO_PREFIX = Prefix(MISSING, 0)


class CostTerms(NamedTuple):
    """Seconds of Eq. 1. ``round_s`` is what the call adds to the next round (Eq. 3), no part of the cost."""

    wait_s: float
    prefill_s: float
    decode_s: float
    kv_s: float
    activate_s: float
    round_s: float

    @property
    def request_s(self) -> float:
        """ΔR_req: wait for the model's next admission, prefill of the suffix, decode."""
        return self.wait_s + self.prefill_s + self.decode_s

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.prefill_s + self.decode_s + self.kv_s + self.activate_s


class Demand(NamedTuple):
    """A call in the policy's numbers: tokens, and decode steps in all and within one round."""

    prompt_tokens: int
    reusable_tokens: int
    suffix_tokens: int
    """At least 1: an engine always prefills the last prompt token."""
    output_tokens: float
    round_steps: float

    @property
    def kv_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens


class Arrival(NamedTuple):
    """A call to be placed, with the prefixes that instances (by index) hold of it."""

    call: Call
    now_s: float
    demand: Demand
    held: dict[int, Prefix]


class Costs(NamedTuple):
    """Seconds per instance for one call: wait without its prefix, Eq. 1, and what it adds to the next round."""

    wait_s: Vector
    cost_s: Vector
    round_s: Vector


class Pricer:
    """Prices calls against a fleet. ``round_steps``: decode steps that one round owes a sequence (Eq. 4)."""

    def __init__(self, fleet: Fleet, sessions: SessionTable, round_steps: float) -> None:
        self._fleet, self._sessions, self._round_steps = fleet, sessions, round_steps
        self._features = np.empty(FEATURES)
        self._feature_rows = self._features.reshape(FEATURES, 1)
        self._product = np.empty((FEATURES, 2 * len(fleet.ids)))
        self._priced: tuple[Arrival, Costs] | None = None
        """The last answer: an explanation asks for it once per instance."""

    def set_round_steps(self, round_steps: float) -> None:
        """Other knobs: what was priced before is priced anew."""
        self._round_steps, self._priced = round_steps, None

    def arrival(self, call: Call, now_s: float) -> Arrival:
        """``call`` at ``now_s`` with everything that its prices depend on."""
        return Arrival(call, now_s, self._demand(call), self._held_prefixes(call))

    def costs(self, arrival: Arrival, columns: ModelColumns) -> Costs:
        """The call's price on every instance; meaningless where the model is not served. An arrival is priced at one moment."""
        if self._priced is not None and self._priced[0] is arrival:
            return self._priced[1]
        waits_s: Vector = np.maximum(columns.slot_at_s - arrival.now_s, 0.0)
        waits_s += columns.queued_s
        cost_s, round_s = self._prices(columns, arrival.demand, waits_s)
        for i in arrival.held:
            if self._fleet.serves(i, arrival.call.key.model):
                terms = self.terms(arrival, i)
                cost_s[i], round_s[i] = terms.cost_s, terms.round_s
        costs = Costs(waits_s, cost_s, round_s)
        self._priced = arrival, costs
        return costs

    def _demand(self, call: Call) -> Demand:
        """``call`` in the policy's numbers. Up to a page is never reused: it is suffix (``Timing.page_tokens``)."""
        output = self._sessions.expected_output_tokens(call)
        page_tokens = self._fleet.page_tokens.get(call.key.model)
        reusable = call.reusable_tokens if call.reusable_tokens < call.prompt_tokens else call.prompt_tokens
        if page_tokens is None or reusable <= page_tokens:
            reusable = 0
        suffix = max(1, call.prompt_tokens - reusable)
        return Demand(call.prompt_tokens, reusable, suffix, output, min(output, self._round_steps))

    def _held_prefixes(self, call: Call) -> dict[int, Prefix]:
        """By instance index, the longest prefix of ``call`` that it reports, or has just computed for us.

        A prefix can only be where calls of its lines went, so the session table names the few instances to look at.
        A snapshot from before a line's last completion cannot know what that completion left on the device.
        """
        held: dict[int, Prefix] = {}
        key = call.key
        for line, shared in reused_lines(call):
            line_key = key if line == key.line else LineKey(key.tenant, key.session, key.model, line)
            entry = self._sessions.line(line_key)
            if entry is None:
                continue
            for name in entry.holders:
                i = self._fleet.index[name]
                snapshot = self._fleet.snapshots[i]
                if name == entry.completed_on and (snapshot is None or snapshot.time_s <= entry.completed_s):
                    prefix = Prefix(DEVICE, min(shared, entry.kv_tokens))
                else:
                    state = snapshot.lines.get(line_key) if snapshot is not None else None
                    if state is None or state.tier is MISSING:
                        continue
                    prefix = Prefix(state.tier, min(shared, state.tokens))
                if prefix.tokens > held.get(i, NO_PREFIX).tokens:
                    held[i] = prefix
        return held

    def _prices(self, columns: ModelColumns, demand: Demand, waits_s: Vector) -> tuple[Vector, Vector]:
        """(Eq. 1 cost, added round seconds) on every instance for a call whose prefix is nowhere."""
        suffix, reusable, steps = demand.suffix_tokens, demand.reusable_tokens, demand.output_tokens
        attention = suffix * (reusable + 0.5 * suffix)
        lost = 1.0 if reusable else 0.0
        half_square = 0.5 * reusable * reusable
        context = demand.prompt_tokens + 0.5 * steps
        round_steps = demand.round_steps
        self._features[:] = (
            1.0, suffix, attention, lost, reusable, half_square, steps, steps * context, round_steps, round_steps * context,
        )  # fmt: skip
        np.multiply(columns.coefficients, self._feature_rows, out=self._product)
        # Not a matrix product: BLAS may sum neighbouring columns in different orders, and equal instances must tie.
        both: Vector = np.add.reduce(self._product)
        cost = both[: waits_s.size]
        cost += waits_s
        return cost, both[waits_s.size :]

    def terms(self, arrival: Arrival, instance: int) -> CostTerms:
        """Eq. 1 on one instance that serves the model, with the part of the call's prefix that it holds."""
        fleet, call, demand = self._fleet, arrival.call, arrival.demand
        name, prefix = call.key.model, arrival.held.get(instance, NO_PREFIX)
        snapshot = fleet.snapshots[instance]
        assert snapshot is not None
        model = snapshot.models[name]
        timing = model.timing
        reusable, suffix = demand.reusable_tokens, demand.suffix_tokens
        prefill_s = timing.prefill_s(suffix, reusable)
        kv_s = 0.0
        kept = min(prefix.tokens, reusable)
        if kept < reusable:
            kv_s = timing.prefill_s(suffix, kept, reusable - kept) - prefill_s
        if prefix.tier is HOST:
            kv_s += timing.restore_s(kept)
        joins_slot = model.residency is ACTIVE and kept > 0 and call.turn > 0 and snapshot.capabilities.session_prefill
        load = fleet.overlay.load(snapshot.instance, name)
        wait_s = fleet.queued_s(instance, model, load)
        if not joins_slot:
            wait_s += max(0.0, snapshot.time_s + model.next_slot_s - arrival.now_s)
        context = demand.prompt_tokens + 0.5 * demand.output_tokens
        batch = model.in_flight + 1
        sequence_s = timing.decode_s_per_sequence + timing.decode_s_per_context_token * context
        decode_s = demand.output_tokens * (timing.decode_base_s + batch * sequence_s)
        round_s = prefill_s + kv_s + demand.round_steps * sequence_s
        if not in_round(model, load):
            round_s += model.activate_s + demand.round_steps * timing.decode_base_s
        return CostTerms(wait_s, prefill_s, decode_s, kv_s, model.activate_s, round_s)
