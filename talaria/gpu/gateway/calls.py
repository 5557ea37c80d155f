"""One call inside the gateway, from its acceptance to its row."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from talaria.gpu.gateway.lines import Begun
from talaria.gpu.gateway.settings import Tenant
from talaria.gpu.protocol.agent import CallEnded
from talaria.gpu.protocol.records import CallRow
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
    unanswered: asyncio.Timeout | None = None
    """The wait for its instance's first byte, while it lasts."""
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

    def row(self) -> CallRow:
        """The call in a recording, once both sides are over."""
        call, routed, word = self.call, self.routed, self.word
        tokens = (0, 0, 0, 0, 0)
        if word is not None:
            tokens = (word.prompt_tokens, word.device_tokens, word.host_tokens, word.recomputed_tokens, word.output_tokens)
        return CallRow(
            self.id, call.key.tenant, call.key.session, call.key.line, call.key.model, call.turn, routed.instance if routed else None,
            self.outcome, self.why, routed.reason if routed else "queue", call.is_return, bool(routed and routed.residency_hit),
            bool(routed and routed.opens), bool(routed and routed.avoidable), self.same_instance, bool(routed and routed.reason == "lease"),
            bool(word and word.by_sp), word.parked if word else 0, word.rounds_waited if word else 0, call.enqueued_s, self.placed_s,
            word.admitted_s if word else -1.0, word.first_token_s if word else -1.0, word.ended_s if word else self.answered_s, *tokens,
        )  # fmt: skip
