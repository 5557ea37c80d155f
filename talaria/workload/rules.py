"""What the lines and calls of a trace owe each other: unique sessions in start order, calls that only look back.

The same rules hold for a trace that is read and for one that is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from talaria.errors import InputError
from talaria.workload.session import Session, TraceCall


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What holds for a whole trace. ``models`` maps names to calls; ``times`` says that sessions have a recorded
    start; ``estimated`` names the fields of calls that the source did not record exactly."""

    name: str
    block_tokens: int = 0
    block_scope: str = "session"
    models: dict[str, int] = field(default_factory=dict)
    source: str = ""
    times: bool = False
    estimated: tuple[str, ...] = ()


def by_calls(counts: Mapping[str, int]) -> dict[str, int]:
    """Models by falling number of calls, ties by name: the order of ``Workload.models``."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


class TraceRules:
    """Call it with every session in turn; it raises InputError at ``where`` for the first rule broken.

    ``calls`` counts the calls of each model so far. Keeps one id per session seen.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self.calls: Counter[str] = Counter()
        self._ids: set[str] = set()
        self._last_start_s = 0.0

    def __call__(self, session: Session, where: str) -> None:
        if session.id in self._ids:
            raise InputError(f"session = {session.id!r} appears twice", where=where, allowed="unique session ids")
        self._ids.add(session.id)
        self._check_start(session, where)
        lines: dict[str, TraceCall] = {}
        for index, call in enumerate(session.calls):
            place = f"{where} calls[{index}]"
            self._check_line(session, call, lines.get(call.line), place)
            self._check_links(session, index, place)
            self._check_blocks(call, place)
            lines[call.line] = call
            self.calls[call.model] += 1

    def _check_start(self, session: Session, where: str) -> None:
        start_s = session.start_s
        if (start_s is not None) != self.header.times:
            allowed = "a number: the header says times: true" if self.header.times else "none: the header says times: false"
            raise InputError(f"start_s = {start_s}", where=where, allowed=allowed)
        if start_s is not None:
            if start_s < self._last_start_s:
                raise InputError(
                    f"start_s = {start_s}", where=where, allowed=f"{self._last_start_s} or later: sessions come in start order"
                )
            self._last_start_s = start_s

    def _check_line(self, session: Session, call: TraceCall, previous: TraceCall | None, where: str) -> None:
        turn = 0 if previous is None else previous.turn + 1
        if call.turn != turn:
            raise InputError(f"turn = {call.turn} on line {call.line!r}", where=where, allowed=f"{turn}: turns count from 0 on each line")
        if previous is not None and call.model != previous.model:
            allowed = f"{previous.model!r}: a line stays on one model"
            raise InputError(f"model = {call.model!r} on line {call.line!r}", where=where, allowed=allowed)
        if previous is None and session.shared_tokens > call.prompt_tokens:
            allowed = f"at most the line's first prompt, {call.prompt_tokens}"
            raise InputError(f"shared_tokens = {session.shared_tokens}", where=where, allowed=allowed)

    def _check_links(self, session: Session, index: int, where: str) -> None:
        call = session.calls[index]
        optional = (("spawned_by", call.spawned_by), ("reuse_of", call.reuse_of))
        links = [("waits_for", other) for other in call.waits_for] + [(name, other) for name, other in optional if other is not None]
        for name, other in links:
            if not 0 <= other < index:
                allowed = f"an earlier call, 0 to {index - 1}" if index else "nothing on the first call"
                raise InputError(f"{name} = {other}", where=where, allowed=allowed)
        if call.reuse_of is None:
            limit, of = 0, "reuse_of is not given"
        else:
            earlier = session.calls[call.reuse_of]
            limit = min(call.prompt_tokens, earlier.prompt_tokens + earlier.output_tokens)
            of = "the prompt, and prompt + output of reuse_of"
        if call.reuse_tokens > limit:
            raise InputError(f"reuse_tokens = {call.reuse_tokens}", where=where, allowed=f"0 to {limit} ({of})")

    def _check_blocks(self, call: TraceCall, where: str) -> None:
        size = self.header.block_tokens
        full = call.prompt_tokens // size if size else 0
        if len(call.blocks) > full:
            reason = f"full blocks of {size} tokens in a prompt of {call.prompt_tokens}" if size else "the header says block_tokens: 0"
            raise InputError(f"{len(call.blocks)} blocks", where=where, allowed=f"at most {full} ({reason})")
