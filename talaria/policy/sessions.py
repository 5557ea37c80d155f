"""The session table: where each line of a session was last served and how much of its KV was seen there (SPEC §3.6).

It is updated from placements and response usage only, and it is bounded: sessions that ended, that have been idle for
long, or that are the least recently used beyond a limit are forgotten. A forgotten session is placed like a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from talaria.policy.calls import Call, LineKey
from talaria.policy.values import value

MAX_SESSIONS = 100_000
IDLE_LIMIT_S = 3600.0
UNKNOWN_MODEL_OUTPUT_TOKENS = 256.0
"""Expected output of a call to a model that has no prior, before the first one has completed."""
MAX_HOLDERS = 4
"""Instances remembered per line, newest first: older copies have long been evicted when a line has moved so often."""


@value(frozen=True, slots=True)
class Usage:
    """What a response says it used, in tokens. ``cached_tokens`` of ``prompt_tokens`` were not recomputed."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class LineEntry:
    """One line: instances that may hold its prefix, newest first, and the last completion's KV length."""

    holders: tuple[str, ...] = ()
    completed_on: str | None = None
    completed_s: float = float("-inf")
    kv_tokens: int = 0


@dataclass(slots=True)
class SessionEntry:
    """One (tenant, session). ``home`` is the instance that its first call went to."""

    home: str | None = None
    last_use_s: float = 0.0
    lines: dict[tuple[str, str], LineEntry] = field(default_factory=dict)
    """By (model, line)."""


class SessionTable:
    """Sessions in order of last use. Every method is O(1), amortised.

    ``output_tokens``: the mean output to expect of a model's calls before any has completed, where it is known.
    """

    def __init__(
        self, output_alpha: float, output_tokens: Mapping[str, float] | None = None, *, max_sessions: int = MAX_SESSIONS,
        idle_limit_s: float = IDLE_LIMIT_S,
    ) -> None:  # fmt: skip
        self._sessions: OrderedDict[tuple[str, str], SessionEntry] = OrderedDict()
        self._outputs = dict(output_tokens or {})
        self.output_alpha = output_alpha
        self._max_sessions, self._idle_limit_s = max_sessions, idle_limit_s
        self._in_use_since_s = float("-inf")
        """No session was used last before this."""

    def __len__(self) -> int:
        return len(self._sessions)

    def home(self, key: LineKey) -> str | None:
        """The instance that the session of ``key`` started on."""
        entry = self._sessions.get((key.tenant, key.session))
        return None if entry is None else entry.home

    def line(self, key: LineKey) -> LineEntry | None:
        """What is known of the line, None if nothing."""
        entry = self._sessions.get((key.tenant, key.session))
        return None if entry is None else entry.lines.get((key.model, key.line))

    def move_home(self, key: LineKey, instance: str, now_s: float) -> None:
        """From now on the session lives on ``instance``."""
        self._touch(key, now_s).home = instance

    def placed(self, key: LineKey, instance: str, now_s: float) -> LineEntry:
        """A call of the line, whose entry is returned, goes to ``instance``, which may hold its prefix from now on."""
        entry = self._touch(key, now_s)
        if entry.home is None:
            entry.home = instance
        name = (key.model, key.line)
        line = entry.lines.get(name)
        if line is None:
            line = entry.lines[name] = LineEntry()
        if not line.holders or line.holders[0] != instance:
            line.holders = (instance, *(name for name in line.holders if name != instance))[:MAX_HOLDERS]
        return line

    def completed(self, key: LineKey, instance: str, usage: Usage, now_s: float) -> None:
        """Record the KV that the response left on ``instance`` and learn the model's output length."""
        line = self.placed(key, instance, now_s)
        line.completed_on, line.completed_s = instance, now_s
        line.kv_tokens = usage.prompt_tokens + usage.output_tokens
        old = self._outputs.get(key.model, float(usage.output_tokens))
        self._outputs[key.model] = old + self.output_alpha * (usage.output_tokens - old)

    def expected_output_tokens(self, call: Call) -> float:
        """The call's own expectation, else the moving average of its model's outputs, which begins at the prior."""
        if call.expected_output_tokens is not None:
            return float(call.expected_output_tokens)
        return self._outputs.get(call.key.model, UNKNOWN_MODEL_OUTPUT_TOKENS)

    def forget(self, tenant: str, session: str) -> None:
        """The session is over."""
        self._sessions.pop((tenant, session), None)

    def _touch(self, key: LineKey, now_s: float) -> SessionEntry:
        """The session's entry as the most recently used one; makes room by forgetting the least recently used."""
        name = (key.tenant, key.session)
        entry = self._sessions.get(name)
        if entry is None:
            entry = self._sessions[name] = SessionEntry()
            while len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(name)
        entry.last_use_s = now_s
        if now_s - self._in_use_since_s > self._idle_limit_s:
            self._in_use_since_s = next(iter(self._sessions.values())).last_use_s
            if now_s - self._in_use_since_s > self._idle_limit_s:
                self._sessions.popitem(last=False)
        return entry
