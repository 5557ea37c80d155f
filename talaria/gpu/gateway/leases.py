"""Live leases as the router reports them, passed on to the instances that they reserve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from talaria.gpu.gateway.settings import Tenant
from talaria.gpu.protocol.agent import Lease
from talaria.policy.calls import LineKey


class LeaseBook:
    """``send(instance, lease)`` tells an instance. What must not end a slot too early, the instance knows itself."""

    def __init__(self, send: Callable[[str, Lease], None]) -> None:
        self.live: dict[LineKey, str] = {}
        """Instance by line."""
        self._send = send
        self._of_tenant: Counter[str] = Counter()

    def changed(self, changes: Iterable[tuple[str, LineKey, float | None]]) -> set[LineKey]:
        """Pass (instance, line, expiry or None) on, in order; returns the lines that were granted a lease."""
        granted = set()
        for name, key, expires_s in changes:
            if self.live.pop(key, None) is not None:
                self._of_tenant[key.tenant] -= 1
            if expires_s is not None:
                self.live[key] = name
                self._of_tenant[key.tenant] += 1
                granted.add(key)
            self._send(name, Lease(key, expires_s))
        return granted

    def may_reserve(self, tenant: Tenant, key: LineKey) -> bool:
        """Whether another return of the tenant may be reserved: the line's own lease would only be replaced."""
        return tenant.max_leases is None or self._of_tenant[tenant.name] - (key in self.live) < tenant.max_leases
