"""The one time at which a slot scheduler wants to be asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_HASTE_S = 1e-6


class Alarm:
    """Calls ``rings`` at the time that was set last, by ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float], rings: Callable[[], None]) -> None:
        self._clock = clock
        self._rings = rings
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, until_s: float | None) -> None:
        if until_s == self._at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at_s, self._timer = until_s, None
        if until_s is not None:
            self._timer = self._loop.call_later(max(0.0, until_s - self._clock()), self._ring)

    def _ring(self) -> None:
        assert self._at_s is not None
        left_s = self._at_s - self._clock()
        if left_s > 0.0:  # the loop's timers are a little coarser than the clock
            self._timer = self._loop.call_later(max(left_s, _HASTE_S), self._ring)
            return
        self._timer = self._at_s = None
        self._rings()
