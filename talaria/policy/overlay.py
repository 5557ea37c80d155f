"""The in-flight overlay: what the router has forwarded or reserved that the newest snapshots cannot show yet (SPEC §3.5).

A forwarded call is invisible to its instance for some milliseconds, so entries leave by submission number, never by
time: the n-th submission to an instance is dropped when a snapshot says ``seen_seq >= n``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """Unseen calls (of one model on one instance, or of all), their predicted prefill and KV seconds and KV tokens; live leases."""

    calls: int = 0
    work_s: float = 0.0
    kv_tokens: float = 0.0
    leases: int = 0

    def add(self, entry: Forwarded) -> None:
        self.calls += 1
        self.work_s += entry.work_s
        self.kv_tokens += entry.kv_tokens

    def remove(self, entry: Forwarded) -> None:
        # The last one out resets the sums: rounding must not leave load behind, least of all a negative one.
        self.calls -= 1
        if not self.calls:
            self.work_s = self.kv_tokens = 0.0
        else:
            self.work_s = max(0.0, self.work_s - entry.work_s)
            self.kv_tokens = max(0.0, self.kv_tokens - entry.kv_tokens)


@dataclass(slots=True, eq=False)
class Forwarded:
    """One submission. It weighs until it is seen or over; it keeps its number until it is seen."""

    call_id: int
    instance: str
    model: str
    work_s: float
    kv_tokens: float
    weighs: bool = True


NOTHING = Load()
"""The load of a model that nothing was forwarded to; never changed."""


class Overlay:
    """Per instance: numbered submissions that no snapshot accounts for, and loads by model.

    ``changed`` collects the (instance, model) pairs whose load changed, in order, until their reader clears it.
    """

    def __init__(self, instances: Iterable[str], lease_charge_s: float) -> None:
        self.lease_charge_s = lease_charge_s
        self.changed: dict[tuple[str, str], None] = {}
        self._unseen: dict[str, deque[Forwarded]] = {name: deque() for name in instances}
        self._seen = dict.fromkeys(self._unseen, 0)
        self._loads: dict[str, dict[str, Load]] = {name: {} for name in self._unseen}
        self._totals = {name: Load() for name in self._unseen}
        self._entries: dict[int, Forwarded] = {}

    def load(self, instance: str, model: str) -> Load:
        """What was forwarded or reserved for one model; only to be read."""
        return self._loads[instance].get(model, NOTHING)

    def total(self, instance: str) -> tuple[int, float]:
        """Over all models of ``instance``: unseen calls, and queued seconds to add to the snapshot's for them and the live leases."""
        total = self._totals[instance]
        return total.calls, total.work_s + self.lease_charge_s * total.leases

    def submitted(self, instance: str) -> int:
        """The number of the newest submission to ``instance``."""
        return self._seen[instance] + len(self._unseen[instance])

    def forward(self, call_id: int, instance: str, model: str, work_s: float, kv_tokens: float) -> int:
        """Count a submission; returns its number on that instance."""
        entry = Forwarded(call_id, instance, model, work_s, kv_tokens)
        self._entries[call_id] = entry
        unseen = self._unseen[instance]
        unseen.append(entry)
        self._load_of(instance, model).add(entry)
        self._totals[instance].add(entry)
        return self._seen[instance] + len(unseen)

    def seen(self, instance: str, seen_seq: int) -> None:
        """A snapshot accounts for every submission up to ``seen_seq``."""
        unseen, number = self._unseen[instance], self._seen[instance]
        while unseen and number < seen_seq:
            self._drop(unseen.popleft())
            number += 1
        self._seen[instance] = number

    def over(self, call_id: int) -> None:
        """A call ended or was lost before any snapshot saw it: it weighs no more, but its instance will still count its number."""
        entry = self._entries.get(call_id)
        if entry is not None and entry.weighs:
            entry.weighs = False
            self._unload(entry)

    def reserve(self, instance: str, model: str) -> None:
        """A lease on ``instance`` is live from now on: one admission unit."""
        self._load_of(instance, model).leases += 1
        self._totals[instance].leases += 1

    def release(self, instance: str, model: str) -> None:
        """A lease on ``instance`` has ended."""
        self._load_of(instance, model).leases -= 1
        self._totals[instance].leases -= 1

    def _drop(self, entry: Forwarded) -> None:
        if self._entries.get(entry.call_id) is entry:
            del self._entries[entry.call_id]
        if entry.weighs:
            self._unload(entry)

    def _unload(self, entry: Forwarded) -> None:
        self._load_of(entry.instance, entry.model).remove(entry)
        self._totals[entry.instance].remove(entry)

    def _load_of(self, instance: str, model: str) -> Load:
        """The load about to be changed."""
        self.changed[instance, model] = None
        loads = self._loads[instance]
        load = loads.get(model)
        if load is None:
            load = loads[model] = Load()
        return load
