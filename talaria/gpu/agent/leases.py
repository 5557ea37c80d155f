"""Leases of lines on an instance, and the completed calls whose end waits for the word on theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from talaria.gpu.agent.calls import AgentCall
from talaria.policy.calls import LineKey
from talaria.policy.instance import EngineView, Event, LeaseChanged, SegmentEnded

LEASE_WORD_S = 0.05
"""How long the end of a completed call waits for the gateway's word on its line's lease."""
LEASE_GRACE_S = 0.02
"""How long an early end of a lease waits for the submission that it announces: they come over two connections."""


class Calls(Protocol):
    """The calls of the instance and the ear of its slot scheduler."""

    clock: Callable[[], float]

    @property
    def view(self) -> EngineView: ...

    @property
    def runs(self) -> Mapping[int, AgentCall]: ...

    def happened(self, event: Event) -> None: ...


class Leases:
    """They live in the view, by line of a model."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._awaiting: dict[LineKey, list[tuple[AgentCall, asyncio.TimerHandle]]] = {}

    @property
    def awaited(self) -> bool:
        """The end of a call waits for a word."""
        return bool(self._awaiting)

    def await_word(self, run: AgentCall) -> None:
        """The scheduler hears of its end when its line's lease is known, or soon after."""
        key = run.view.call.key
        timer = self._loop.call_later(LEASE_WORD_S, self.settle, key)
        self._awaiting.setdefault(key, []).append((run, timer))

    def changed(self, key: LineKey, expires_s: float | None) -> None:
        """A grant is noted; an early end waits for the submission that it may announce. Either is the word on a completed call."""
        model = self._calls.view.models.get(key.model)
        if model is None:
            return
        if expires_s is not None:
            model.leases[key] = (self._calls.clock(), expires_s)
        elif key in model.leases:
            self._loop.call_later(LEASE_GRACE_S, self._over, key, model.leases[key])
        self.settle(key)

    def _over(self, key: LineKey, lease: tuple[float, float]) -> None:
        model = self._calls.view.models[key.model]
        if model.leases.get(key) is not lease:
            return
        if any(not run.arrived and run.view.call.key[:3] == key[:3] for run in self._calls.runs.values()):
            self._loop.call_later(LEASE_GRACE_S, self._over, key, lease)
            return
        del model.leases[key]
        if lease[1] > self._calls.clock() and key.model == self._calls.view.active and not model.running:
            self._calls.happened(LeaseChanged(key, None))

    def live(self) -> list[tuple[tuple[str, str, str, str], float, float]]:
        """(line, granted, expires) of all leases that have not run out."""
        now_s = self._calls.clock()
        return [(key, *times) for model in self._calls.view.models.values() for key, times in model.leases.items() if times[1] > now_s]

    def settle(self, key: LineKey) -> None:
        """Let the scheduler hear of the completed calls of a line."""
        for run, timer in self._awaiting.pop(key, ()):
            timer.cancel()
            del self._calls.view.models[run.model].running[run.id]
            self._calls.happened(SegmentEnded(run.id, run.view.generated_tokens, "finished"))

    def settle_all(self) -> None:
        for key in list(self._awaiting):
            self.settle(key)
