"""The simulator's kernel: SimPy's, with what a simulated call needs most at hand, the time and alarms."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from simpy.core import EmptySchedule, Environment
from simpy.events import NORMAL


class Alarm:
    """Calls a function with itself when its time has come. No SimPy event: nobody waits for it, and it cannot fail."""

    __slots__ = ("callbacks", "value")

    _ok = True

    def __init__(self, action: Callable[[Alarm], None], value: Any) -> None:
        self.callbacks: list[Callable[[Alarm], None]] | None = [action]
        self.value = value


class Kernel(Environment):
    """Alarms and SimPy's own events come in one order: by time, then as they were set."""

    now = 0.0
    """The time in seconds; an attribute, where SimPy has a property that everybody would call all the time."""

    def alarm(self, delay_s: float, action: Callable[[Alarm], None], value: Any = None) -> Alarm:
        """Call ``action`` after ``delay_s``; whoever set the alarm compares it to the newest one that he has set, if he may set another."""
        queue: list[Any] = self._queue
        alarm = Alarm(action, value)
        heappush(queue, (self.now + delay_s, NORMAL, next(self._eid), alarm))
        return alarm

    def step(self) -> None:
        """Process the next event, as SimPy's own ``step`` does."""
        queue = self._queue
        if not queue:
            raise EmptySchedule
        self.now, _, _, event = heappop(queue)
        self._now = self.now
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
        for callback in callbacks:
            callback(event)
        if not event._ok and not hasattr(event, "_defused"):
            raise event._value

    def count_events(self) -> int:
        """How many there were, once all is over; the end is one, too. SimPy numbers its events, and has no other count."""
        return next(self._eid) + 1
