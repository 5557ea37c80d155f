"""The books that every router keeps: snapshots, overlay, sessions, leases, overload; a router itself only decides.

A router never waits and never reads a clock: its decisions are a function of what it was told, in order, so that a
decision log can be replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np

from talaria.policy.calls import Call, LineKey
from talaria.policy.cost import NO_PREFIX, Arrival, CostTerms, Pricer
from talaria.policy.explain import Candidate, Explanation, Gate
from talaria.policy.fleet import Fleet
from talaria.policy.knobs import Knobs
from talaria.policy.leases import Lease, LeaseCounts, LeaseTable
from talaria.policy.overlay import Overlay
from talaria.policy.overload import CallQueue, Overloaded
from talaria.policy.sessions import SessionTable, Usage
from talaria.policy.snapshot import ABSENT, Capabilities, InstanceSnapshot
from talaria.policy.values import value


@value(frozen=True, slots=True)
class Routed:
    """A placement. ``cost_s`` = ``request_s`` + ``kv_s`` + ``activate_s`` (Eq. 1), as predicted when it was made.

    ``reason``: lease, cost, spill, queue (from the router's own queue), sticky, pressure, rotation, health (moved since
    its home is down), or a word of another system's rule (``policy/peers``). ``seq``: number of this submission on that
    instance. ``residency_hit``: the model was active, staged or parked there. ``opens``: it was absent there, whether or not an
    earlier call waits for it too; ``avoidable``: although another healthy instance has it resident.
    """

    call_id: int
    instance: str
    reason: str
    seq: int
    residency_hit: bool
    opens: bool
    avoidable: bool
    cost_s: float
    request_s: float
    kv_s: float
    activate_s: float


class Decision(NamedTuple):
    """``instance`` by index, None where no candidate is left; ``denied`` says why ``lease`` was not honoured."""

    instance: int | None
    reason: str
    lease: Lease | None = None
    denied: str = ""


class Router(ABC):
    """The books. Hosts report what happens, ask ``place``, and call ``poll`` when ``next_poll_s`` is due.

    Times are seconds on one clock, which snapshots share, and never go back. ``nu_s`` overrides the knob per model;
    ``output_tokens`` is the mean output per model to expect of calls that do not say theirs, until outputs were observed.
    """

    name: ClassVar[str]
    has_leases: ClassVar[bool] = False

    def __init__(
        self, instances: Mapping[str, Capabilities], knobs: Knobs, nu_s: Mapping[str, float] | None = None,
        output_tokens: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.knobs = knobs
        self._overlay = Overlay(instances, knobs.lease_charge_s)
        self._fleet = Fleet(instances, knobs, nu_s or {}, self._overlay)
        self._sessions = SessionTable(knobs.ewma_alpha, output_tokens)
        self._leases = LeaseTable(self._overlay)
        self._queue = CallQueue(knobs.queue_limit, knobs.queue_deadline_s)
        self._pricer = Pricer(self._fleet, self._sessions, self._fleet.round_bound_s / knobs.t_tpot_s)
        self._consumed: dict[int, Lease] = {}
        self._shed: list[Overloaded] = []
        self._retry_s: float | None = None
        self._prepare()

    # --- what a router decides ------------------------------------------------------------------------------------

    @abstractmethod
    def _decide(self, arrival: Arrival) -> Decision:
        """Where the call should go now. Changes nothing."""

    def _placed(self, arrival: Arrival, decision: Decision, terms: CostTerms) -> None:
        """What the router's own rule must remember of a placement; most remember nothing."""
        return

    def _prepare(self) -> None:
        """Begin what the router's own rule keeps, once the rest stands; most keep nothing."""
        return

    def _reserve_s(self, call: Call, instance: str, kv_tokens: int) -> float:
        """For how long the return of the line of ``call`` is reserved; of routers that ``has_leases``."""
        return self.knobs.tau_s

    def _gates(self, arrival: Arrival, instance: int) -> tuple[Gate, ...]:
        """The checks that ``instance`` must pass for this call; what ``_decide`` does, one instance at a time."""
        fleet, model = self._fleet, arrival.call.key.model
        left_s = fleet.fresh_until_s[instance] - arrival.now_s
        return (
            Gate("serves", fleet.serves(instance, model), f"model {model}"),
            Gate("healthy", fleet.healthy[instance], "heartbeat and snapshot"),
            Gate("fresh", bool(left_s >= 0.0), f"{left_s:.3f} s of freshness left"),
        )

    def _note(self, arrival: Arrival, instance: int) -> str:
        """What the router's own rule sees in ``instance``, in words."""
        return ""

    # --- tuning -----------------------------------------------------------------------------------------------------

    def set_knobs(self, knobs: Knobs, now_s: float) -> None:
        """Decide by ``knobs`` from now on. Leases that were granted keep their expiry, queued calls their place and deadline."""
        self.knobs = knobs
        self._overlay.lease_charge_s = knobs.lease_charge_s
        self._fleet.set_knobs(knobs)
        self._sessions.output_alpha = knobs.ewma_alpha
        self._queue.set_limits(knobs.queue_limit, knobs.queue_deadline_s)
        self._pricer.set_round_steps(self._fleet.round_bound_s / knobs.t_tpot_s)
        self._retry_soon(now_s)

    # --- telemetry --------------------------------------------------------------------------------------------------

    def observe(self, snapshot: InstanceSnapshot, now_s: float) -> None:
        """Take a snapshot received at ``now_s``. Older versions are ignored: an instance's versions only rise."""
        self._overlay.seen(snapshot.instance, snapshot.seen_seq)
        self._fleet.observe(snapshot, now_s)
        self._retry_soon(now_s)

    def prepare(self) -> None:
        """Bring the prices up to date with what was observed and placed. A placement that needs them does it otherwise.

        For a host that has time between calls: the next call need not wait for it then.
        """
        self._fleet.refresh()

    def heartbeat(self, instance: str, healthy: bool, now_s: float) -> None:
        """Health as the host sees it; True: alive, with nothing newer to tell than its last snapshot.

        After a missed heartbeat only fresh telemetry lets new placements in again.
        """
        self._fleet.heartbeat(self._fleet.index[instance], healthy, now_s)
        self._retry_soon(now_s)

    def adopt(self, instance: str, leases: Sequence[Lease], lines: Sequence[LineKey], now_s: float) -> None:
        """Take over what an earlier router left on ``instance``: live leases, and lines whose prefix it reports, oldest first.

        A line that is leased elsewhere already keeps that lease.
        """
        self._leases.expire(now_s)
        for key in lines:
            self._sessions.placed(key, instance, now_s)
        for lease in leases if self.has_leases else ():
            self._leases.adopt(lease, now_s)

    # --- placement --------------------------------------------------------------------------------------------------

    def place(self, call: Call, now_s: float) -> Routed | Overloaded:
        """Algorithm 1. A Routed call is already counted in the overlay; a queued one is answered by ``poll`` later."""
        self._leases.expire(now_s)
        arrival = self._pricer.arrival(call, now_s)
        decision = self._or_spill(arrival, self._decide(arrival))
        if decision.instance is not None:
            return self._commit(arrival, decision)
        if decision.lease is not None:
            self._leases.discard(decision.lease, None)
        if decision.reason == "shed":
            return Overloaded(call.id, "shed", self._why_none(arrival))
        shed = self._queue.join(call, now_s)
        if shed is not None and shed.call_id == call.id:
            return shed
        if shed is not None:
            self._shed.append(shed)
            self._retry_s = now_s
        return Overloaded(call.id, "queue", self._why_none(arrival))

    def explain(self, call: Call, now_s: float) -> Explanation:
        """What ``place`` would do now and why. Changes nothing; leases due for expiry count as expired once polled."""
        arrival = self._pricer.arrival(call, now_s)
        return self._explanation(arrival, self._or_spill(arrival, self._decide(arrival)))

    def submit_failed(self, call: Call, routed: Routed, now_s: float) -> None:
        """The instance never took the call: it weighs no more, and a lease that it consumed lives on until its expiry.

        Its number stays taken, and the host tells the instance not to wait for it.
        """
        self._overlay.over(call.id)
        lease = self._consumed.pop(call.id, None)
        if lease is not None:
            self._leases.restore(lease, now_s)
        self._retry_soon(now_s)

    def completed(self, call: Call, instance: str, usage: Usage, now_s: float, reserve: bool = True) -> Lease | None:
        """The response is complete: update the session table and reserve the line's return for τ, unless not to ``reserve``."""
        self._leases.expire(now_s)
        self._close(call, now_s)
        self._sessions.completed(call.key, instance, usage, now_s)
        tokens = usage.prompt_tokens + usage.output_tokens
        tau_s = self._reserve_s(call, instance, tokens) if reserve and self.has_leases else 0.0
        return self._leases.grant(call.key, instance, tokens, now_s, tau_s)

    def withdraw(self, call: Call, now_s: float) -> bool:
        """The client of a queued call has left: it makes room at once. False where the call is not queued; ``poll`` has its answer."""
        queued = self._queue.withdraw(call)
        if queued:
            self._retry_soon(now_s)  # it may have held back others of its tenant
        return queued

    def ended(self, call: Call, now_s: float) -> None:
        """The call was submitted and its instance shed or failed it: no usage, no lease."""
        self._close(call, now_s)

    def session_ended(self, tenant: str, session: str) -> None:
        """Forget the session. Its leases run out by themselves: a reservation is kept although nobody returns."""
        self._sessions.forget(tenant, session)

    # --- time -------------------------------------------------------------------------------------------------------

    def next_poll_s(self) -> float | None:
        """When ``poll`` is due: a lease or a queue deadline runs out, or queued calls may fit after a change."""
        due = (self._leases.next_expiry_s(), self._queue.next_deadline_s(), self._retry_s)
        return min((time_s for time_s in due if time_s is not None), default=None)

    def poll(self, now_s: float) -> list[Routed | Overloaded]:
        """Expire leases, shed queued calls past their deadline, and place those that fit now; every answer is final."""
        self._leases.expire(now_s)
        self._retry_s = None
        answers: list[Routed | Overloaded] = [*self._shed, *self._queue.expire(now_s)]
        self._shed.clear()

        def take(call: Call) -> bool:
            arrival = self._pricer.arrival(call, now_s)
            decision = self._or_spill(arrival, self._decide(arrival))
            if decision.instance is None:
                return False
            if not (decision.lease and not decision.denied):
                decision = decision._replace(reason="queue")
            answers.append(self._commit(arrival, decision))
            return True

        self._queue.serve(take)
        return answers

    # --- books for hosts and reports ----------------------------------------------------------------------------------

    @property
    def lease_counts(self) -> LeaseCounts:
        """Leases by how they ended, for the unused-lease proxy (SPEC §6)."""
        return self._leases.counts

    def drain_lease_changes(self) -> list[tuple[str, LineKey, float | None]]:
        """(instance, line, expiry or None for an end) since the last call, in order, for ``Instance.lease_changed``."""
        return self._leases.drain_changes()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _close(self, call: Call, now_s: float) -> None:
        self._overlay.over(call.id)
        self._consumed.pop(call.id, None)
        self._retry_soon(now_s)

    def _retry_soon(self, now_s: float) -> None:
        if len(self._queue):
            self._retry_s = now_s

    def _or_spill(self, arrival: Arrival, decision: Decision) -> Decision:
        """The overload policy's answer where no candidate is left; ``reason`` is its action (SPEC §3.2, step 3)."""
        if decision.instance is not None:
            return decision
        if self.knobs.overload == "shed" or not self._may_ever_serve(arrival.call.key.model):
            return decision._replace(reason="shed")
        spill = self._spill(arrival) if self.knobs.overload == "spill" else None
        return decision._replace(reason="queue") if spill is None else decision._replace(instance=spill, reason="spill")

    def _spill(self, arrival: Arrival) -> int | None:
        """Least cost, regardless of checks, where telemetry is fresh; if it is nowhere, where the instance is healthy."""
        columns = self._fleet.columns(arrival.call.key.model)
        if columns is None:
            return None
        cost_s = self._pricer.costs(arrival, columns).cost_s
        served = columns.kv_room_tokens >= 0.0
        for allowed in (self._fleet.takes_new(columns, arrival.now_s), served & np.array(self._fleet.healthy)):
            if allowed.any():
                return int(np.where(allowed, cost_s, inf).argmin())
        return None

    def _may_ever_serve(self, model: str) -> bool:
        columns = self._fleet.columns(model)
        if columns is not None and bool((columns.kv_room_tokens >= 0.0).any()):
            return True
        return any(snapshot is None for snapshot in self._fleet.snapshots)

    def _why_none(self, arrival: Arrival) -> str:
        model = arrival.call.key.model
        columns = self._fleet.columns(model)
        if not self._may_ever_serve(model):
            return f"no instance serves model {model!r}"
        if columns is None or not self._fleet.takes_new(columns, arrival.now_s).any():
            return f"no healthy instance with fresh telemetry serves model {model!r}"
        return f"no instance can take a call of model {model!r} within its round, memory and replica limits"

    def _commit(self, arrival: Arrival, decision: Decision) -> Routed:
        """Enter the placement in the books: lease, overlay, session table."""
        call, i = arrival.call, decision.instance
        assert i is not None
        instance, model = self._fleet.ids[i], call.key.model
        terms = self._pricer.terms(arrival, i)
        snapshot = self._fleet.snapshots[i]
        assert snapshot is not None
        there = snapshot.models[model]
        hit = there.residency is not ABSENT
        avoidable = not hit and self._fleet.resident_somewhere(model)
        if decision.lease is not None and not decision.denied:
            self._leases.consume(decision.lease)
            self._consumed[call.id] = decision.lease
        else:
            if decision.lease is not None:
                self._leases.discard(decision.lease, instance)
            self._leases.came_back(call, instance)
        seq = self._overlay.forward(call.id, instance, model, terms.prefill_s + terms.kv_s, arrival.demand.kv_tokens)
        self._sessions.placed(call.key, instance, arrival.now_s)
        self._placed(arrival, decision, terms)
        return Routed(
            call.id, instance, decision.reason, seq, hit, not hit, avoidable,
            terms.cost_s, terms.request_s, terms.kv_s, terms.activate_s,
        )  # fmt: skip

    def _explanation(self, arrival: Arrival, decision: Decision) -> Explanation:
        call, fleet = arrival.call, self._fleet
        candidates = []
        for i, name in enumerate(fleet.ids):
            terms = self._pricer.terms(arrival, i) if fleet.serves(i, call.key.model) else None
            prefix = arrival.held.get(i, NO_PREFIX)
            candidates.append(Candidate(name, terms, prefix, self._gates(arrival, i), self._note(arrival, i)))
        lease = "none"
        if decision.lease is not None:
            verdict = f"discarded: {decision.denied}" if decision.denied else "honoured"
            lease = f"on {decision.lease.instance} until {decision.lease.expires_s:.3f} s, {verdict}"
        chosen = None if decision.instance is None else fleet.ids[decision.instance]
        return Explanation(call.id, call.key.model, arrival.now_s, tuple(candidates), lease, chosen, decision.reason)
