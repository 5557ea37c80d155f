"""What happens to a call that no instance may take now: queue it, shed it, or spill it (SPEC §3.2, step 3).

The queue is the router's own. It is bounded, first in first out per tenant and model, served one call per tenant in
turn, and every call in it has a deadline. When it is full, the tenant with the most queued calls loses its newest.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable

from talaria.policy.calls import Call
from talaria.policy.values import value


@value(frozen=True, slots=True)
class Overloaded:
    """``action``: ``queue`` (the router keeps the call; ``poll`` answers later) or ``shed`` (final). ``reason`` in words."""

    call_id: int
    action: str
    reason: str


class CallQueue:
    """Queued calls by tenant, in order of arrival."""

    def __init__(self, limit: int, deadline_s: float) -> None:
        self._limit, self._deadline_s = limit, deadline_s
        self._tenants: dict[str, dict[int, Call]] = {}
        self._turn: deque[str] = deque()
        self._deadlines: list[tuple[float, int, Call]] = []
        self._of_model: Counter[str] = Counter()
        self._length = 0
        self._joined = 0

    def __len__(self) -> int:
        return self._length

    def set_limits(self, limit: int, deadline_s: float) -> None:
        """For calls that join from now on."""
        self._limit, self._deadline_s = limit, deadline_s

    def queued_of(self, model: str) -> int:
        """How many calls of ``model`` are queued, over all tenants."""
        return self._of_model.get(model, 0)

    def join(self, call: Call, now_s: float) -> Overloaded | None:
        """Queue ``call``. Returns the call that was shed to make room, which may be ``call`` itself.

        The deadline is ``queue_deadline`` from now or the call's own, whichever is earlier.
        """
        self._add(call, now_s)
        if self._length <= self._limit:
            return None
        # Ties go to the tenant that arrived now: a newcomer never takes the place of an equally modest one.
        tenant = max(self._tenants, key=lambda name: (len(self._tenants[name]), name == call.key.tenant))
        victim = self._tenants[tenant][next(reversed(self._tenants[tenant]))]
        self._remove(victim)
        reason = f"router queue is full ({self._limit} calls) and tenant {tenant!r} has the most in it"
        return Overloaded(victim.id, "shed", reason)

    def withdraw(self, call: Call) -> bool:
        """Nobody waits for ``call`` any more; returns whether it was queued."""
        queued = self._tenants.get(call.key.tenant, {}).get(call.id) is not None
        if queued:
            self._remove(call)
        return queued

    def expire(self, now_s: float) -> list[Overloaded]:
        """Shed every call whose deadline has come, earliest first."""
        shed = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, call = heapq.heappop(self._deadlines)
            if self._tenants.get(call.key.tenant, {}).get(call.id) is call:
                self._remove(call)
                shed.append(Overloaded(call.id, "shed", f"no instance could take it before its queue deadline at {deadline_s:.3f} s"))
        return shed

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a queued call."""
        while self._deadlines:
            deadline_s, _, call = self._deadlines[0]
            if self._tenants.get(call.key.tenant, {}).get(call.id) is call:
                return deadline_s
            heapq.heappop(self._deadlines)
        return None

    def serve(self, take: Callable[[Call], bool]) -> None:
        """Offer calls to ``take``, one per tenant in turn, until a whole turn places none.

        A refused call holds back later calls of its tenant and model, not those of other models.
        """
        refused: set[tuple[str, str]] = set()
        idle_turns = 0
        while self._turn and idle_turns < len(self._turn):
            tenant = self._turn[0]
            self._turn.rotate(-1)
            taken = self._first_taken(tenant, refused, take)
            if taken is None:
                idle_turns += 1
            else:
                self._remove(taken)
                idle_turns = 0

    def _first_taken(self, tenant: str, refused: set[tuple[str, str]], take: Callable[[Call], bool]) -> Call | None:
        for call in self._tenants[tenant].values():
            lane = (tenant, call.key.model)
            if lane in refused:
                continue
            if take(call):
                return call
            refused.add(lane)
        return None

    def _add(self, call: Call, now_s: float) -> None:
        tenant = call.key.tenant
        calls = self._tenants.get(tenant)
        if calls is None:
            calls = self._tenants[tenant] = {}
            self._turn.append(tenant)
        calls[call.id] = call
        self._length += 1
        self._of_model[call.key.model] += 1
        deadline_s = now_s + self._deadline_s
        if call.deadline_s is not None:
            deadline_s = min(deadline_s, call.deadline_s)
        self._joined += 1
        heapq.heappush(self._deadlines, (deadline_s, self._joined, call))

    def _remove(self, call: Call) -> None:
        tenant = call.key.tenant
        del self._tenants[tenant][call.id]
        if not self._tenants[tenant]:
            del self._tenants[tenant]
            self._turn.remove(tenant)
        self._length -= 1
        self._of_model[call.key.model] -= 1
