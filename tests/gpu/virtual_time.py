"""An asyncio loop in virtual time: it never sleeps, the next timer is always now. For tests without sockets or threads."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time`` stands still while anything is ready, then jumps to the next timer."""

    def __init__(self, start_s: float = 1000.0) -> None:
        super().__init__()
        self._now_s = start_s

    def time(self) -> float:
        return self._now_s

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run until the condition holds; False if it does not within ``limit_s``, or if nothing more will happen."""
        deadline_s = self._now_s + limit_s
        while not until():
            if not self._ready:  # type: ignore[attr-defined]
                due_s = self._next_timer_s()
                if due_s is None or due_s > deadline_s:
                    return False
                self._now_s = max(self._now_s, due_s)
            self.call_soon(self.stop)
            self.run_forever()
        return True

    @property
    def at_rest(self) -> bool:
        """Nothing will happen by itself any more."""
        return not self._ready and self._next_timer_s() is None  # type: ignore[attr-defined]

    def _next_timer_s(self) -> float | None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False
        return timers[0].when() if timers else None
