"""A router whose every answer goes to the decision log, for the host that asks: the same calls, the same answers.

Both worlds put it in the router's place where a log is wanted, so that neither can forget a line of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from talaria.policy.calls import Call, LineKey
from talaria.policy.knobs import Knobs
from talaria.policy.leases import Lease
from talaria.policy.router import Overloaded, Routed, Router, Usage
from talaria.policy.snapshot import InstanceSnapshot
from talaria.report.declog import RouterLog

T = TypeVar("T")


class RecordingRouter:
    """The methods of ``policy.router.Router`` that hosts call, each logged with its answer.

    ``clock`` gives the host's time in seconds for the methods that are not told it.
    """

    def __init__(self, router: Router, log: RouterLog, clock: Callable[[], float]) -> None:
        self._router = router
        self._log = log
        self._clock = clock

    def set_knobs(self, knobs: Knobs, now_s: float) -> None:
        self._router.set_knobs(knobs, now_s)
        self._log.router("set_knobs", (knobs, now_s), None, now_s)

    def observe(self, snapshot: InstanceSnapshot, now_s: float) -> None:
        self._router.observe(snapshot, now_s)
        self._log.router("observe", (snapshot, now_s), None, now_s)

    def prepare(self) -> None:
        """Not logged: it changes no answer."""
        self._router.prepare()

    def heartbeat(self, instance: str, healthy: bool, now_s: float) -> None:
        self._router.heartbeat(instance, healthy, now_s)
        self._log.router("heartbeat", (instance, healthy, now_s), None, now_s)

    def place(self, call: Call, now_s: float) -> Routed | Overloaded:
        """The log also says why: the explanation stands before the placement."""
        self._log.router("explain", (call, now_s), self._router.explain(call, now_s), now_s)
        return self._logged("place", (call, now_s), self._router.place(call, now_s), now_s)

    def adopt(self, instance: str, leases: Sequence[Lease], lines: Sequence[LineKey], now_s: float) -> None:
        self._router.adopt(instance, leases, lines, now_s)
        self._log.router("adopt", (instance, tuple(leases), tuple(lines), now_s), None, now_s)

    def submit_failed(self, call: Call, routed: Routed, now_s: float) -> None:
        self._router.submit_failed(call, routed, now_s)
        self._log.router("submit_failed", (call, routed, now_s), None, now_s)

    def completed(self, call: Call, instance: str, usage: Usage, now_s: float, reserve: bool = True) -> Lease | None:
        arguments = (call, instance, usage, now_s) if reserve else (call, instance, usage, now_s, reserve)
        return self._logged("completed", arguments, self._router.completed(*arguments), now_s)

    def withdraw(self, call: Call, now_s: float) -> bool:
        return self._logged("withdraw", (call, now_s), self._router.withdraw(call, now_s), now_s)

    def ended(self, call: Call, now_s: float) -> None:
        self._router.ended(call, now_s)
        self._log.router("ended", (call, now_s), None, now_s)

    def session_ended(self, tenant: str, session: str) -> None:
        self._router.session_ended(tenant, session)
        self._log.router("session_ended", (tenant, session), None, self._clock())

    def next_poll_s(self) -> float | None:
        """Not logged: the poll that follows is."""
        return self._router.next_poll_s()

    def poll(self, now_s: float) -> list[Routed | Overloaded]:
        return self._logged("poll", (now_s,), self._router.poll(now_s), now_s)

    def drain_lease_changes(self) -> list[tuple[str, LineKey, float | None]]:
        return self._logged("drain_lease_changes", (), self._router.drain_lease_changes(), self._clock())

    def _logged(self, method: str, arguments: tuple[object, ...], answer: T, now_s: float) -> T:
        self._log.router(method, arguments, answer, now_s)
        return answer
