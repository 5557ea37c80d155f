"""Sessions as the simulator and the replayer run them: plain values, produced lazily, one session at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from talaria.policy.values import value


@value(frozen=True, slots=True)
class TraceCall:
    """One recorded or generated model call of a session.

    It is released ``gap_s`` after the last of ``waits_for`` (indices into the session's calls) has completed, or
    after the session's start where it waits for none. ``gap_s`` is the client's own time only. Its prompt continues
    the first ``reuse_tokens`` tokens of (prompt + response) of call ``reuse_of``. ``blocks`` are content hashes of
    the prompt's full blocks where the trace has them; they also show reuse between sessions.
    """

    line: str
    model: str
    turn: int
    """Position within its line, from 0."""
    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    waits_for: tuple[int, ...] = ()
    spawned_by: int | None = None
    """On the first call of a subagent's line: the index of the call that spawned it."""
    reuse_of: int | None = None
    reuse_tokens: int = 0
    blocks: tuple[int, ...] = ()


@value(frozen=True, slots=True)
class Session:
    """One user task. ``start_s`` is its recorded start (0-based), ``None`` where the trace has no times."""

    id: str
    calls: tuple[TraceCall, ...]
    tenant: str = "default"
    start_s: float | None = None
    shared_tokens: int = 0
    """Leading tokens of every line's first prompt (system prompt, tools) that all sessions of the workload have in common."""


class Workload(Protocol):
    """A lazy supply of sessions in start order. ``block_tokens`` is 0 where calls carry no block hashes;
    ``block_scope`` is ``global`` (equal hashes are equal content everywhere) or ``session``."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def block_scope(self) -> str: ...

    def models(self) -> tuple[str, ...]:
        """Model names in order of falling number of calls, ties by name."""

    def sessions(self) -> Iterator[Session]: ...
