"""From calls as a log shows them to a session: lines, turns, dependencies, client gaps and reuse, by one set of rules.

Every importer describes its records as ``RecordedCall`` and leaves the rest to ``assemble``, so that a gap or a reused
prefix means the same whatever the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from talaria.substrate.prefix import common_prefix
from talaria.workload.importers.report import ImportReport
from talaria.workload.session import Session, TraceCall

MAIN = "main"
CHARS_PER_TOKEN = 4
"""The usual rule of thumb, for traces that only count characters (SPEC §7)."""

UNNAMED_MODEL = "model"
"""The one model of traces that name none."""
TYPICAL_OUTPUT_TOKENS = 145
"""The median response of agent sessions (SPEC §7), where a trace does not record responses."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One model call of one session as its log shows it.

    ``agent`` is the thread of control that issued it; ``parent`` the agent that spawned that one. ``start_s`` and
    ``end_s`` are on one clock per session, ``None`` where the log has no times; then ``gap_s`` is the client's delay
    before the call. ``joined_s`` (on any call of a subagent) is when its parent got the result, if the log says so.
    ``cached_tokens`` is a cache hit that the server reported: at least so much of the prompt was a known prefix.
    ``reuse_tokens`` is the reuse of the agent's previous call where the log states it. ``after`` names the calls (by
    ``key``) that this one waits for, where the log says so; ``None`` leaves it to the times. ``continues`` names the call whose
    prompt and response this one goes on from, where that is not its agent's previous call.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    agent: str = MAIN
    parent: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    joined_s: float | None = None
    gap_s: float = 0.0
    cached_tokens: int | None = None
    reuse_tokens: int | None = None
    blocks: tuple[int, ...] = ()
    key: str = ""
    after: tuple[str, ...] | None = None
    continues: str | None = None


def tokens_of_chars(chars: int) -> int:
    """An estimate of the tokens in so many characters, at least one."""
    return max(1, -(-chars // CHARS_PER_TOKEN))


def output_or_typical(output_tokens: int | None, report: ImportReport) -> int:
    """The recorded response, or the median one where none was recorded, which the report then counts."""
    if output_tokens is None:
        report.note(f"responses of unknown length taken as {TYPICAL_OUTPUT_TOKENS} tokens")
        return TYPICAL_OUTPUT_TOKENS
    return output_tokens


def chars_of(content: Any) -> int:
    """Characters of a chat message's content: a text, or a list of parts with texts."""
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def signed_hash(value: int) -> int:
    """An unsigned 64-bit hash as the signed number that the trace format holds; one-to-one."""
    return value - 2**64 if value >= 2**63 else value


def assemble(
    session: str,
    recorded: Iterable[RecordedCall],
    report: ImportReport,
    *,
    start_s: float | None = None,
    block_tokens: int = 0,
    clock_resolution_s: float = 0.0,
) -> Session:
    """The session of one log. ``start_s`` is where it begins on the trace's clock.

    Calls are ordered by start. A call waits for its agent's previous call and for every subagent that its agent had
    spawned and got back since; its gap is what is left after the last of them. A subagent's first call waits for its
    parent's latest call that had ended. ``clock_resolution_s`` is how much times of one moment may differ.
    An agent that uses several models has one line per model, since a prefix is only good for one.
    """
    calls = sorted(recorded, key=lambda call: call.start_s or 0.0)
    builder = _Builder(calls, block_tokens, clock_resolution_s, report)
    return Session(session, tuple(builder.build(index) for index in range(len(calls))), start_s=start_s)


def in_start_order(sessions: Iterable[Session]) -> list[Session]:
    """Sessions by start, those of the same start in the order given."""
    return sorted(sessions, key=lambda session: session.start_s or 0.0)


def assemble_all(sessions: Mapping[str, Sequence[RecordedCall]], report: ImportReport, *, block_tokens: int = 0) -> list[Session]:
    """Sessions of a log with one clock for all: in start order, from the earliest call's start as zero."""
    starts_s = {name: min(call.start_s or 0.0 for call in calls) for name, calls in sessions.items()}
    zero_s = min(starts_s.values(), default=0.0)
    return [
        assemble(name, sessions[name], report, start_s=round(starts_s[name] - zero_s, 6), block_tokens=block_tokens)
        for name in sorted(sessions, key=lambda name: starts_s[name])
    ]


class _Builder:
    """Builds the calls of one session in order; what it keeps is about the calls built so far."""

    def __init__(self, calls: list[RecordedCall], block_tokens: int, resolution_s: float, report: ImportReport) -> None:
        self.calls, self.block_tokens, self.resolution_s, self.report = calls, block_tokens, resolution_s, report
        self.agent_calls: dict[str, list[int]] = {}
        self.by_key: dict[str, int] = {}
        self.last_of_line: dict[tuple[str, str], int] = {}
        self.turns: dict[str, int] = {}
        self.home_model: dict[str, str] = {}
        self.joined: set[str] = set()
        self.last_of_agent = {call.agent: index for index, call in enumerate(calls)}
        """The final call of every agent, known ahead: a parent joins a subagent only when that is over."""

    def build(self, index: int) -> TraceCall:
        call = self.calls[index]
        before = self.agent_calls.setdefault(call.agent, [])
        if call.after is not None:
            waits = tuple(self.by_key[key] for key in call.after)
        elif before:
            waits = (*self._joins(index, before[-1]), before[-1])
        else:
            waits = self._spawner(call)
        spawned_by = waits[0] if waits and not before and call.parent is not None else None
        home = self.home_model.setdefault(call.agent, call.model)
        line = call.agent if call.model == home else f"{call.agent}/{call.model}"
        turn = self.turns.get(line, 0)
        self.turns[line] = turn + 1
        prompt_tokens, output_tokens = self._clamped(call)
        self.calls[index] = call = replace(call, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        reuse_of, reuse_tokens = self._reuse(call)
        before.append(index)
        self.by_key[call.key] = index
        self.last_of_line[call.agent, call.model] = index
        return TraceCall(
            line=line, model=call.model, turn=turn, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
            gap_s=self._gap_s(call, waits), waits_for=tuple(sorted(waits)), spawned_by=spawned_by, reuse_of=reuse_of,
            reuse_tokens=reuse_tokens, blocks=call.blocks,
        )  # fmt: skip

    def _clamped(self, call: RecordedCall) -> tuple[int, int]:
        if call.prompt_tokens < 1:
            self.report.note("empty prompts taken as 1 token")
        if call.output_tokens < 1:
            self.report.note("empty outputs taken as 1 token")
        return max(1, call.prompt_tokens), max(1, call.output_tokens)

    def _joins(self, index: int, previous: int) -> tuple[int, ...]:
        """Last calls of the subagents that ``index``'s agent got back between its previous call and this one."""
        call = self.calls[index]
        if call.start_s is None:
            return ()
        ended = []
        for agent, last in self.last_of_agent.items():
            child = self.calls[last]
            if child.parent != call.agent or agent in self.joined or last >= index:
                continue
            back_s = child.joined_s if child.joined_s is not None else child.end_s
            if back_s is not None and back_s <= call.start_s + self.resolution_s:
                self.joined.add(agent)
                if back_s > (self.calls[previous].end_s or 0.0):
                    ended.append(last)
        return tuple(ended)

    def _spawner(self, call: RecordedCall) -> tuple[int, ...]:
        """The parent's latest call that had ended when ``call`` began, else its first."""
        candidates = self.agent_calls.get(call.parent or "", [])
        if not candidates:
            return ()
        limit_s = (call.start_s or 0.0) + self.resolution_s
        over = [index for index in candidates if (self.calls[index].end_s or 0.0) <= limit_s]
        return (over[-1] if over else candidates[0],)

    def _gap_s(self, call: RecordedCall, waits: Sequence[int]) -> float:
        if call.start_s is None:
            return call.gap_s
        if not waits:
            return max(0.0, call.start_s - (self.calls[0].start_s or 0.0))
        ready_s = max(self.calls[index].end_s or 0.0 for index in waits)
        gap_s = call.start_s - ready_s
        if gap_s < -self.resolution_s:
            self.report.note("calls that began before the call they follow had ended, run after it")
        return round(max(0.0, gap_s), 6)

    def _reuse(self, call: RecordedCall) -> tuple[int | None, int]:
        """The earlier call whose prompt and response this prompt continues longest, and for how many tokens."""
        previous = self.last_of_line.get((call.agent, call.model))
        if call.continues is not None and self.calls[self.by_key[call.continues]].model == call.model:
            previous = self.by_key[call.continues]
        best: tuple[int | None, int] = (None, 0)
        if self.block_tokens and call.blocks:
            own_first = sorted(self.last_of_line.items(), key=lambda item: item[1] != previous)
            for (_, model), index in own_first:
                if model == call.model and (tokens := self._shared_tokens(self.calls[index], call)) > best[1]:
                    best = index, tokens
        elif previous is not None:
            tokens = linear_reuse_tokens(self.calls[previous], call)
            best = (previous, tokens) if tokens else best
        return best

    def _shared_tokens(self, earlier: RecordedCall, call: RecordedCall) -> int:
        shared = common_prefix(earlier.blocks, call.blocks)
        whole = earlier.prompt_tokens + earlier.output_tokens
        if shared == len(earlier.blocks) and shared and call.prompt_tokens >= whole:
            return whole  # every full block of the earlier prompt is there: its tail and its response follow it
        return min(shared * self.block_tokens, call.prompt_tokens)


def linear_reuse_tokens(earlier: RecordedCall, call: RecordedCall) -> int:
    """How much of (earlier prompt + response) ``call`` continues, where no hashes tell.

    Stated reuse comes first. Otherwise a prompt that did not shrink is the history plus something new; one that did
    was rewritten, and only a reported cache hit is known to be shared.
    """
    whole = earlier.prompt_tokens + earlier.output_tokens
    if call.reuse_tokens is not None:
        reuse = call.reuse_tokens
    elif call.prompt_tokens >= whole:
        reuse = whole
    elif call.prompt_tokens >= earlier.prompt_tokens:
        reuse = earlier.prompt_tokens  # the response was dropped or shortened
    else:
        reuse = call.cached_tokens or 0
    return min(reuse, whole, call.prompt_tokens)
