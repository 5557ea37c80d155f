"""Leases: soft reservations of a session's return to the instance that served it (SPEC §3.1).

A lease is born when a call completes and ends in exactly one way: used by the matching return, expired, discarded
because its instance or prefix is gone, or replaced by its successor. It pins no KV and promises no execution; all it
costs is one admission unit in the router's overlay.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from talaria.policy.calls import Call, LineKey
from talaria.policy.overlay import Overlay
from talaria.policy.values import value


@value(frozen=True, slots=True)
class Lease:
    """``prefix_tokens`` of ``key``'s line are reserved on ``instance`` while now < ``expires_s``."""

    key: LineKey
    instance: str
    prefix_tokens: int
    granted_s: float
    expires_s: float


@dataclass(slots=True)
class LeaseCounts:
    """granted = live + used + unused + returned, at any moment.

    ``used``: the return was routed by its lease. ``unused``: no return came to that instance before the expiry (SPEC §6).
    ``returned``: the return came in time to that instance, but by cost, since it did not match or the lease was discarded.
    ``discarded``: ended by Algorithm 1 because the instance or the prefix was gone; also counted as unused or returned.
    """

    granted: int = 0
    used: int = 0
    unused: int = 0
    returned: int = 0
    discarded: int = 0


def reused_lines(call: Call) -> tuple[tuple[str, int], ...]:
    """(line, shared tokens) that the prompt continues, longest first; a host that names no line means the call's own."""
    if call.continues or call.reusable_tokens <= 0:
        return call.continues
    return ((call.key.line, call.reusable_tokens),)


class LeaseTable:
    """Live leases: a set per (tenant, session, model), one per line. Grants and ends are kept for ``drain_changes``."""

    def __init__(self, overlay: Overlay) -> None:
        self.counts = LeaseCounts()
        self._overlay = overlay
        self._live: dict[LineKey, Lease] = {}
        self._came_back: set[LineKey] = set()
        self._of_model: Counter[str] = Counter()
        self._expiries: list[tuple[float, int, Lease]] = []
        self._grants = 0
        self._changes: list[tuple[str, LineKey, float | None]] = []

    def __len__(self) -> int:
        return len(self._live)

    def live_of(self, model: str) -> int:
        """Returns of ``model`` that are promised right now, on all instances."""
        return self._of_model.get(model, 0)

    def match(self, call: Call, now_s: float) -> Lease | None:
        """The live lease whose prefix ``call`` continues longest, or None. Changes nothing."""
        if not self._live:
            return None
        key = call.key
        for line, shared in reused_lines(call):
            if shared <= 0:
                continue
            lease = self._live.get(key if line == key.line else LineKey(key.tenant, key.session, key.model, line))
            if lease is not None and now_s < lease.expires_s:
                return lease
        return None

    def grant(self, key: LineKey, instance: str, prefix_tokens: int, now_s: float, tau_s: float) -> Lease | None:
        """Reserve the line's return for ``tau_s``, in place of the line's earlier lease. None if that is no time."""
        old = self._live.get(key)
        if old is not None:
            self._end(old)
            self._settle(old)
        if tau_s <= 0.0:
            return None
        lease = Lease(key, instance, prefix_tokens, now_s, now_s + tau_s)
        self.counts.granted += 1
        self._install(lease)
        return lease

    def adopt(self, lease: Lease, now_s: float) -> None:
        """A lease of an earlier router lives on here, unless it is over or the line has one."""
        if now_s < lease.expires_s and lease.key not in self._live:
            self.counts.granted += 1
            self._install(lease)

    def consume(self, lease: Lease) -> None:
        """The matching return is routed by ``lease``."""
        self._end(lease)
        self._came_back.discard(lease.key)
        self.counts.used += 1

    def restore(self, lease: Lease, now_s: float) -> None:
        """The submission that consumed ``lease`` failed: it lives on until its expiry, unless a successor exists."""
        self.counts.used -= 1
        if now_s < lease.expires_s and lease.key not in self._live:
            self._install(lease)
        else:
            self._settle(lease)

    def discard(self, lease: Lease, placed_on: str | None) -> None:
        """Algorithm 1 found the instance or prefix gone; the return then went to ``placed_on``."""
        self._end(lease)
        if placed_on == lease.instance:
            self._came_back.add(lease.key)
        self.counts.discarded += 1
        self._settle(lease)

    def came_back(self, call: Call, instance: str) -> None:
        """``call`` goes to ``instance`` without a lease: a lease of its lines there counts as returned, and lives on."""
        if not self._live:
            return
        key = call.key
        for line in (key.line, *(line for line, _ in call.continues)):
            lease = self._live.get(LineKey(key.tenant, key.session, key.model, line))
            if lease is not None and lease.instance == instance:
                self._came_back.add(lease.key)

    def expire(self, now_s: float) -> None:
        """End every lease whose time has come: live means now < ``expires_s``."""
        while self._expiries and self._expiries[0][0] <= now_s:
            lease = heapq.heappop(self._expiries)[2]
            if self._live.get(lease.key) is lease:
                self._end(lease)
                self._settle(lease)

    def next_expiry_s(self) -> float | None:
        """The earliest expiry of a live lease."""
        while self._expiries and self._live.get(self._expiries[0][2].key) is not self._expiries[0][2]:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def drain_changes(self) -> list[tuple[str, LineKey, float | None]]:
        """(instance, line, expiry or None where it ended) since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _install(self, lease: Lease) -> None:
        self._live[lease.key] = lease
        self._of_model[lease.key.model] += 1
        self._grants += 1
        heapq.heappush(self._expiries, (lease.expires_s, self._grants, lease))
        self._overlay.reserve(lease.instance, lease.key.model)
        self._changes.append((lease.instance, lease.key, lease.expires_s))

    def _end(self, lease: Lease) -> None:
        del self._live[lease.key]
        self._of_model[lease.key.model] -= 1
        self._overlay.release(lease.instance, lease.key.model)
        self._changes.append((lease.instance, lease.key, None))

    def _settle(self, lease: Lease) -> None:
        """Count a lease that ended without being used."""
        if lease.key in self._came_back:
            self._came_back.remove(lease.key)
            self.counts.returned += 1
        else:
            self.counts.unused += 1
