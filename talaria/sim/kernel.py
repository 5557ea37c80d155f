"""The simulator's kernel: SimPy's, with what a simulated call needs most at hand, the time and alarms."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

from simpy import events
from simpy.core import EmptySchedule, Environment

NORMAL: Final = int(events.NORMAL)


class Alarm:
    """Calls a function with itself when its time has come. No SimPy event: nobody waits for it, and it cannot fail."""

    __slots__ = ("action", "value")

    def __init__(self, action: Callable[[Alarm], None], value: Any) -> None:
        self.action = action
        self.value = value


class Kernel(Environment):
    """Alarms and SimPy's own events come in one order: by time, then as they were set."""

    now = 0.0
    """The time in seconds; an attribute, where SimPy has a property that everybody would call all the time."""

    def __init__(self) -> None:
        super().__init__()
        self._agenda: list[tuple[float, int, int, Any]] = self._queue  # type: ignore[assignment]
        """When, priority, number and what: SimPy's queue, under an attribute of this class, which is faster once compiled."""
        self._numbered = 0

    def alarm(self, delay_s: float, action: Callable[[Alarm], None], value: Any = None) -> Alarm:
        """Call ``action`` after ``delay_s``; whoever set the alarm compares it to the newest one that he has set, if he may set another."""
        alarm = Alarm(action, value)
        heappush(self._agenda, (self.now + delay_s, NORMAL, self._numbered, alarm))
        self._numbered += 1
        return alarm

    def schedule(self, event: events.Event, priority: int = NORMAL, delay: float = 0.0) -> None:
        heappush(self._agenda, (self.now + delay, priority, self._numbered, event))
        self._numbered += 1

    def step(self) -> None:
        """Process the next event, as SimPy's own ``step`` does."""
        agenda = self._agenda
        if not agenda:
            raise EmptySchedule
        self.now, _, _, event = heappop(agenda)
        if type(event) is Alarm:
            event.action(event)
            return
        callbacks, event.callbacks = event.callbacks, None
        for callback in callbacks:
            callback(event)
        if not event._ok and not hasattr(event, "_defused"):
            raise event._value

    def count_events(self) -> int:
        """How many there were, once all is over; the end is one, too."""
        return self._numbered + 1
