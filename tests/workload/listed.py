"""A workload of sessions written out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from talaria.workload.session import Session, TraceCall


class Listed:
    name = "listed"
    block_tokens = 0
    block_scope = "session"

    def __init__(self, *sessions: Session) -> None:
        self._sessions = sessions
        self.drawn = 0
        """Sessions handed out so far."""

    def models(self) -> tuple[str, ...]:
        calls = Counter(call.model for session in self._sessions for call in session.calls)
        return tuple(sorted(calls, key=lambda model: (-calls[model], model)))

    def sessions(self) -> Iterator[Session]:
        for session in self._sessions:
            self.drawn += 1
            yield session


def chain(name: str, depth: int, *, model: str = "a", gap_s: float = 1.0, start_s: float | None = None) -> Session:
    """A session of one line: prompts 100, 200, … tokens, 10 tokens out, each call continuing the one before in full."""
    calls = [TraceCall("main", model, 0, 100, 10)]
    for turn in range(1, depth):
        calls.append(
            TraceCall(
                "main",
                model,
                turn,
                100 * (turn + 1),
                10,
                gap_s=gap_s,
                waits_for=(turn - 1,),
                reuse_of=turn - 1,
                reuse_tokens=100 * turn + 10,
            )
        )
    return Session(name, tuple(calls), start_s=start_s)
