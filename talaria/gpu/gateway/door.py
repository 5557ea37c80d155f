"""Who may come in: so many requests at once, of one tenant and of all, and none while the gateway begins anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from talaria.gpu.dialects import Problem
from talaria.gpu.gateway.settings import Tenant

SHED_RETRY_S: Final = 5.0
"""When whoever was turned away is told to come again."""


class Door:
    """Of one gateway."""

    def __init__(self) -> None:
        self.resetting = False
        self.inside = 0
        """Requests in flight."""
        self._of_tenant: Counter[str] = Counter()

    def check(self) -> None:
        """Raises Problem during a reset."""
        if self.resetting:
            raise Problem(503, "the gateway is being reset", kind="overloaded", retry_after_s=1.0)

    @contextmanager
    def room(self, tenant: Tenant, most: int) -> Iterator[None]:
        """A request is in flight inside, its body's way here included. Raises Problem where one more would be too many."""
        self.check()
        if self.inside >= most:
            raise Problem(503, f"the gateway has {self.inside} calls in flight, its limit", kind="overloaded", retry_after_s=SHED_RETRY_S)
        if tenant.max_in_flight is not None and self._of_tenant[tenant.name] >= tenant.max_in_flight:
            raise Problem(429, f"this key has {tenant.max_in_flight} calls in flight, its limit", kind="too_many_calls", retry_after_s=1.0)
        self.inside += 1
        self._of_tenant[tenant.name] += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._of_tenant[tenant.name] -= 1
            if not self._of_tenant[tenant.name]:
                del self._of_tenant[tenant.name]
