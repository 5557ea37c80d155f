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
