"""A call as every policy sees it, and the key under which its reusable prefix is known."""

from __future__ import annotations

from typing import NamedTuple

from talaria.policy.values import value


class LineKey(NamedTuple):
    """One chain of prefixes: all state of a session is kept under this key (SPEC §1)."""

    tenant: str
    session: str
    model: str
    line: str


@value(frozen=True, slots=True)
class Call:
    """One model call of an agent session.

    ``enqueued_s`` is the *intended* enqueue time, from which the schedule-aware TTFT counts. ``reusable_tokens`` of
    ``prompt_tokens`` continue the line's previous prompt and response; zero for a first call and after a rewrite.
    ``continues`` names the lines of this session whose prefix the prompt continues, with the tokens shared,
    longest first; a host computes it from its own session book (hash chains, node ids). ``expected_output_tokens``
    is known in a replay and ``None`` otherwise: the policy then uses its own estimate. ``exact`` is False where the
    token counts are estimates (DESIGN, "One call's way through"): a log or a host can tell, decisions do not depend on it.
    """

    id: int
    key: LineKey
    turn: int
    enqueued_s: float
    prompt_tokens: int
    reusable_tokens: int = 0
    expected_output_tokens: int | None = None
    continues: tuple[tuple[str, int], ...] = ()
    deadline_s: float | None = None
    exact: bool = True

    @property
    def is_return(self) -> bool:
        """A continuation: any call of a line after its first (SPEC §1)."""
        return self.turn > 0

    @property
    def suffix_tokens(self) -> int:
        return self.prompt_tokens - self.reusable_tokens
