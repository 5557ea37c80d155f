"""The gateway's book of sessions: per line, the conversation's chain of hashes with the token counts that answers taught.

A call continues a line if it begins with all of that line's newest prompt. Whatever else shares a known prefix (a fork, a
rewind, parallel tries at one task) gets a line of its own that names where its prefix lies. Counts are estimates: what a
mark says exactly, plus the characters after it times what the model's tokenizer makes of a character.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from talaria.gpu.gateway.conversation import Conversation
from talaria.policy.calls import LineKey

MARKS = 8
"""Answers remembered per line, newest last."""
MOST_LINES = 64
"""Per session; the least recently used is forgotten beyond it."""
MOST_CONTINUED = 4
"""Lines that a call names as its prefix."""
TOKENS_PER_CHARACTER = 0.28
"""Before a model has taught better."""
LEAST_CHARACTERS = 200
"""To learn from."""
LEARN = 0.1


class Mark(NamedTuple):
    """A prompt whose length is known: its items, their hash, its characters, and tokens of it and of its answer."""

    items: int
    digest: bytes
    characters: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True, eq=False)
class Line:
    """``items`` and ``digest``: the newest prompt's."""

    key: LineKey
    used_s: float
    items: int = 0
    digest: bytes = b""
    turn: int = -1
    completed: bool = True
    """The newest prompt has been answered."""
    open_calls: int = 0
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))
    inherited_tokens: int = 0
    """An earlier gateway's line: what its instance reports of it, until its next call."""
    served_by: str | None = None

    def covered_by(self, asked: Conversation) -> bool:
        return asked.covers(self.items, self.digest)

    def known(self, asked: Conversation) -> Mark | None:
        """The longest known prompt that ``asked`` begins with."""
        for mark in reversed(self.marks):
            if asked.covers(mark.items, mark.digest):
                return mark
        return None


class Begun(NamedTuple):
    """A call as the book sees it; to be given back when the call ends."""

    line: Line
    turn: int
    prompt_tokens: int
    reusable_tokens: int
    continues: tuple[tuple[str, int], ...]
    asked: Conversation
    new_characters: int


@dataclass(slots=True)
class Entry:
    """One session of one tenant."""

    used_s: float
    signal: str
    lines: OrderedDict[LineKey, Line] = field(default_factory=OrderedDict)


class SessionBook:
    """Sessions in order of last use, forgotten after ``idle_s`` without a call or beyond ``most`` of them.

    ``forgotten`` is told of a line that is of no interest any more, ``session_over`` of a session.
    """

    def __init__(
        self, idle_s: float, forgotten: Callable[[Line], None], session_over: Callable[[str, str], None], most: int = 50_000
    ) -> None:
        self.idle_s = idle_s
        self._forgotten, self._session_over, self._most = forgotten, session_over, most
        self._sessions: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._tokens_per_character: dict[str, float] = {}
        self._raw: dict[tuple[str, str, bytes], Line] = {}
        """Raw prompts without a session of their own, by tenant, model and hash of the newest prompt."""

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> Iterable[tuple[tuple[str, str], Entry]]:
        """(tenant, session) and its entry, least recently used first."""
        return self._sessions.items()

    # --- calls -----------------------------------------------------------------------------------------------------

    def begin(self, tenant: str, session: str, signal: str, model: str, asked: Conversation, now_s: float) -> Begun:
        """A call arrives; its line is the line of its ``LineKey`` from now on."""
        if asked.raw and signal == "root":
            session = self._raw_session(tenant, model, asked) or session
        entry = self._touch(tenant, session, signal, now_s)
        lines = [line for key, line in entry.lines.items() if key.model == model]
        line = max((line for line in lines if line.covered_by(asked)), key=lambda line: line.items, default=None)
        inherited = False
        if line is None:
            line = next((line for line in lines if line.key.line == asked.root.hex() and (line.inherited_tokens or not asked.items)), None)
            inherited = line is not None and line.inherited_tokens > 0
        is_new = line is None
        if line is None:
            line = self._open(entry, LineKey(tenant, session, model, self._name(lines, asked)), now_s)
        begun = self._estimate(line, lines, asked, inherited)
        if is_new and begun.continues:
            begun = begun._replace(turn=1 + max(other.turn for other in lines if other.key.line == begun.continues[0][0]))
        self._advance(entry, line, begun, now_s)
        return begun

    def completed(self, begun: Begun, instance: str, prompt_tokens: int, output_tokens: int) -> None:
        """The call's answer is complete and says how many tokens it was."""
        line, asked = begun.line, begun.asked
        if asked.items:
            line.marks.append(Mark(asked.items, asked.hashes[-1], asked.total_characters, prompt_tokens, output_tokens))
        if (line.items, line.digest) == (asked.items, asked.hashes[-1] if asked.items else b""):
            line.completed = True
        line.served_by = instance
        new_tokens = prompt_tokens - begun.reusable_tokens
        if begun.new_characters >= LEAST_CHARACTERS and new_tokens > 0:
            model = line.key.model
            old = self._tokens_per_character.get(model)
            seen = min(2.0, max(0.02, new_tokens / begun.new_characters))
            self._tokens_per_character[model] = seen if old is None else old + LEARN * (seen - old)

    def ended(self, begun: Begun) -> None:
        """The call is over, however it ended."""
        begun.line.open_calls -= 1

    # --- life ------------------------------------------------------------------------------------------------------

    def adopt(self, key: LineKey, tokens: int, instance: str, now_s: float) -> None:
        """A line that an earlier gateway opened, and whose prefix ``instance`` still reports."""
        if tokens <= 0 or "." in key.line:
            return
        entry = self._touch(key.tenant, key.session, "inherited", now_s)
        if key not in entry.lines:
            line = self._open(entry, key, now_s)
            line.inherited_tokens, line.served_by = tokens, instance

    def expire(self, now_s: float) -> None:
        """Forget sessions that have been idle for too long and have no call open."""
        while self._sessions:
            name, entry = next(iter(self._sessions.items()))
            if now_s - entry.used_s <= self.idle_s:
                break
            if any(line.open_calls for line in entry.lines.values()):
                entry.used_s = now_s
                self._sessions.move_to_end(name)
            else:
                self._drop(*name)

    def _drop(self, tenant: str, session: str) -> None:
        for line in self._sessions.pop((tenant, session)).lines.values():
            self._close(line)
        self._session_over(tenant, session)

    def _touch(self, tenant: str, session: str, signal: str, now_s: float) -> Entry:
        name = (tenant, session)
        entry = self._sessions.get(name)
        if entry is None:
            entry = self._sessions[name] = Entry(now_s, signal)
            if len(self._sessions) > self._most:
                idle = next((key for key, old in self._sessions.items() if not any(line.open_calls for line in old.lines.values())), name)
                if idle != name:
                    self._drop(*idle)
        else:
            self._sessions.move_to_end(name)
            entry.used_s = now_s
            if entry.signal == "inherited":
                entry.signal = signal
        return entry

    def _open(self, entry: Entry, key: LineKey, now_s: float) -> Line:
        line = entry.lines[key] = Line(key, now_s)
        if len(entry.lines) > MOST_LINES:
            oldest = next((old for old in entry.lines.values() if not old.open_calls and old is not line), None)
            if oldest is not None:
                del entry.lines[oldest.key]
                self._close(oldest)
        return line

    def _close(self, line: Line) -> None:
        self._forget_raw(line)
        self._forgotten(line)

    def _forget_raw(self, line: Line) -> None:
        name = (line.key.tenant, line.key.model, line.digest)
        if self._raw.get(name) is line:  # else another line has the same prompt
            del self._raw[name]

    def _name(self, lines: list[Line], asked: Conversation) -> str:
        """The root's hash, so that another gateway would give the same name; further lines of one root also say where they are."""
        taken = {line.key.line for line in lines}
        root = name = asked.root.hex()
        here = asked.hashes[-1].hex()[:12] if asked.items else "0"
        tries = 0
        while name in taken:
            name = f"{root}.{here}" if not tries else f"{root}.{here}.{tries}"
            tries += 1
        return name

    def _advance(self, entry: Entry, line: Line, begun: Begun, now_s: float) -> None:
        asked = begun.asked
        digest = asked.hashes[-1] if asked.items else b""
        key = line.key
        if asked.raw and asked.items:
            self._forget_raw(line)
            self._raw[key.tenant, key.model, digest] = line
        if (line.items, line.digest) != (asked.items, digest):
            line.items, line.digest, line.completed = asked.items, digest, False
        line.turn, line.inherited_tokens, line.used_s = begun.turn, 0, now_s
        line.open_calls += 1
        entry.lines.move_to_end(key)

    def _raw_session(self, tenant: str, model: str, asked: Conversation) -> str | None:
        for digest in reversed(asked.hashes):
            line = self._raw.get((tenant, model, digest))
            if line is not None:
                return line.key.session
        return None

    # --- estimates -------------------------------------------------------------------------------------------------

    def _estimate(self, line: Line, lines: list[Line], asked: Conversation, inherited: bool) -> Begun:
        per_character = self._tokens_per_character.get(line.key.model, TOKENS_PER_CHARACTER)
        turn = line.turn + 1 if line.completed else max(0, line.turn)
        if inherited:
            prompt_tokens = max(1, round(asked.total_characters * per_character))
            shared = min(line.inherited_tokens, prompt_tokens)
            return Begun(line, max(1, asked.outputs()), prompt_tokens, shared, ((line.key.line, shared),), asked, 0)
        found = []
        for other in lines if line in lines else [*lines, line]:
            mark = other.known(asked)
            if mark is not None:
                found.append((*_shared(mark, asked, per_character), other is line, other.key.line))
        found.sort(reverse=True)
        reusable, characters = found[0][:2] if found else (0, 0)
        new_characters = max(0, asked.total_characters - characters)
        prompt_tokens = max(1, reusable + round(new_characters * per_character))
        continues = tuple((name, tokens) for tokens, _, _, name in found[:MOST_CONTINUED])
        return Begun(line, turn, prompt_tokens, reusable, continues, asked, new_characters)


def _shared(mark: Mark, asked: Conversation, per_character: float) -> tuple[int, int]:
    """Tokens that ``asked`` shares with the prompt of ``mark`` and its answer, and the characters that they are."""
    if asked.raw:
        rest = asked.total_characters - mark.characters
        if rest < 0:
            return mark.prompt_tokens, asked.total_characters
        output = min(rest, round(mark.output_tokens / per_character))
        return mark.prompt_tokens + (mark.output_tokens if output else 0), mark.characters + output
    end = asked.output_end(mark.items)
    if end == mark.items:
        return mark.prompt_tokens, mark.characters
    return mark.prompt_tokens + mark.output_tokens, asked.characters[end - 1]
