"""One call inside the gateway, from its acceptance to its row."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from talaria.gpu.gateway.lines import Begun
from talaria.gpu.gateway.settings import Tenant
from talaria.gpu.protocol.agent import CallEnded
from talaria.policy.calls import Call
from talaria.policy.router import Routed


@dataclass(slots=True, eq=False)
class LiveCall:
    """``id`` is its public number. Each submission is a ``Call`` of its own number; the first one's is the same."""

    id: int
    tenant: Tenant
    begun: Begun
    call: Call
    routed: Routed | None = None
    attempts: int = 0
    placed_s: float = -1.0
    same_instance: bool = False
    word: CallEnded | None = None
    """What its agent said at its end."""
    spoken: asyncio.Event = field(default_factory=asyncio.Event)
    answer: tuple[str, str] | None = None
    """Outcome (or ``left``: the client did not wait for it) and reason, once the client's side is over."""
    answered_s: float = -1.0

    @property
    def outcome(self) -> str:
        """Completed only if client and agent agree; a client that left as the last byte was on its way had what it wanted."""
        assert self.answer is not None
        said = self.answer[0]
        if said == "left":
            return "completed" if self.word is not None and self.word.outcome == "completed" else "failed"
        return "failed" if said == "completed" and self.word is not None and self.word.outcome != "completed" else said

    @property
    def why(self) -> str:
        assert self.answer is not None
        return self.answer[1] or (self.word.why if self.word is not None else "")


class Numbering:
    """The router's numbers of submissions to one instance, and the agent's, which begin anew when it does."""

    def __init__(self) -> None:
        self._last = 0
        self._ahead = 0
        """The router's number less the agent's."""

    def sent(self, seq: int) -> int:
        """The agent's number of the router's ``seq``."""
        self._last = max(self._last, seq)
        return seq - self._ahead

    def linked(self, seen_seq: int) -> None:
        """A link begins, and the agent counts from here. A smaller number than ours: it has yet to see what is on its way."""
        if seen_seq == 0 or seen_seq + self._ahead > self._last:
            self._ahead = self._last - seen_seq

    def seen(self, seen_seq: int) -> int:
        """The router's number of the agent's ``seen_seq``."""
        return seen_seq + self._ahead

    def forget(self) -> None:
        """A new router begins from zero; ``linked`` comes before its first call."""
        self._last = self._ahead = 0
