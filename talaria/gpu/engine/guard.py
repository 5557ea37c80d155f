"""Which control requests an engine may be sent. SGLang dies of a release while busy and of a resume without a release, so each
request goes through ``Guard.step``, which refuses what is not legal and remembers what came of the rest.

    RUNNING --pause--> PAUSED --flush--> IDLE --release--> RELEASED --resume(each tag)--> IDLE --go_on--> RUNNING
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

from talaria.gpu.engine.errors import Busy

TAGS: Final = ("weights", "kv_cache", "cuda_graph")
"""The memory that a release gives back, in the order in which it is brought back (SPEC §5.4, phases 2 to 4)."""


class Hold(Enum):
    """What an engine's scheduler does with its memory and its calls."""

    RUNNING = "running"
    PAUSED = "paused"
    """Takes no step; calls may still be inside."""
    IDLE = "idle"
    """Paused, flushed, and thereby seen to be idle."""
    RELEASED = "released"
    """Some or all of its memory is given back."""
    BROKEN = "broken"
    """A request failed half-way: only a new process is safe."""


_LEGAL: Final = {
    ("pause", Hold.RUNNING): Hold.PAUSED,
    ("flush", Hold.PAUSED): Hold.IDLE,
    ("release", Hold.IDLE): Hold.RELEASED,
    ("go_on", Hold.PAUSED): Hold.RUNNING,
    ("go_on", Hold.IDLE): Hold.RUNNING,
}


class IllegalStep(Exception):
    """A control request that would kill the engine, or whose answer is still out; a bug of the caller."""


class Guard:
    """The engine's part in the protocol, as far as its answers have told."""

    def __init__(self) -> None:
        self.hold = Hold.RUNNING
        self._released: set[str] = set()
        self._under_way: str | None = None

    @contextmanager
    def step(self, name: str, tag: str = "") -> Iterator[None]:
        """Send the request inside: ``pause``, ``flush``, ``release``, ``resume`` of a tag, ``go_on``.

        ``Busy`` from inside leaves all as it was; any other exception breaks the engine, since nobody knows how far it got.
        Raises IllegalStep before anything is sent.
        """
        after = self._after(name, tag)
        self._under_way = name
        try:
            yield
        except Busy:
            raise
        except BaseException:
            self.hold = Hold.BROKEN
            raise
        else:
            self._took(name, tag, after)
        finally:
            self._under_way = None

    def _after(self, name: str, tag: str) -> Hold:
        if self._under_way is not None:
            raise IllegalStep(f"{name} while {self._under_way} is under way")
        if name == "resume" and self.hold is Hold.RELEASED and tag in self._released:
            return Hold.RELEASED if len(self._released) > 1 else Hold.IDLE
        after = _LEGAL.get((name, self.hold))
        if after is None:
            raise IllegalStep(f"{' '.join([name, tag]).strip()} of an engine that is {self.hold.value}")
        return after

    def _took(self, name: str, tag: str, after: Hold) -> None:
        if name == "release":
            self._released = set(TAGS)
        elif name == "resume":
            self._released.remove(tag)
        self.hold = after
