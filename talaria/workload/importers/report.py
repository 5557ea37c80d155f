"""What an importer hands back: sessions, what holds for all of them, and a count of everything done to the records.

Nothing is dropped, merged, clamped or guessed without a note in the ``ImportReport``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from talaria.workload.session import Session


def counted(number: int, noun: str) -> str:
    """``1 session``, ``2 sessions``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True)
class Imported:
    """Sessions in start order, read lazily where the format allows; the rest as in ``TraceHeader``."""

    sessions: Iterable[Session]
    block_tokens: int = 0
    block_scope: str = "session"
    times: bool = False
    estimated: tuple[str, ...] = ()


@dataclass(slots=True)
class ImportReport:
    """Counts of one import. ``notes`` maps a plural phrase ("content blocks merged into one call") to its count;
    ``estimated`` are fields of calls that some notes make estimates, beside those that the format always estimates."""

    sessions: int = 0
    calls: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    estimated: set[str] = field(default_factory=set)

    def note(self, what: str, count: int = 1, *, estimates: str | None = None) -> None:
        if count:
            self.notes[what] += count
            if estimates is not None:
                self.estimated.add(estimates)

    def lines(self) -> list[str]:
        """One line of totals, then one per note in the order of first occurrence."""
        totals = f"{counted(self.sessions, 'session')}, {counted(self.calls, 'call')}"
        return [totals, *(f"  {count} {what}" for what, count in self.notes.items())]
