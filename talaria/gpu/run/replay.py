"""Sessions of a trace, replayed in a closed loop: a call is sent its gap after the last call that it waits for has ended.

The rules are the simulator's: lines of a session run beside each other, a session whose call was refused or failed gives up what it
had planned, and a closed pool starts the next session when one ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from talaria.gpu.protocol.agent import now_s
from talaria.gpu.run.client import Answer, Client, completion_body
from talaria.gpu.run.prompts import PromptBook, SessionText
from talaria.workload.session import Session


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of the trace and what came of it; ``answer`` is None for one that a session gave up without sending it."""

    session: int
    """Number of the session, in order of starting."""
    line: int
    """Number of the line in its session."""
    index: int
    """Of the call in its session."""
    enqueued_s: float
    """When it was due."""
    answer: Answer | None


@dataclass(slots=True, eq=False)
class _Live:
    """A session under way."""

    number: int
    session: Session
    text: SessionText = field(default_factory=SessionText)
    done: dict[int, asyncio.Event] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    aborted: bool = False


class Replayer:
    """``sent`` is told of every call, once."""

    def __init__(self, client: Client, prompts: PromptBook, sent: Callable[[Session, Sent], None], gap_cap_s: float | None) -> None:
        self._client, self._prompts, self._sent, self._gap_cap_s = client, prompts, sent, gap_cap_s

    async def run(self, schedule: Iterable[tuple[float, Session]], pool: int | None) -> None:
        """Replay all sessions; ``schedule`` has their starts in seconds from now, rising."""
        began_s = now_s()
        places = asyncio.Semaphore(pool) if pool is not None else None
        async with asyncio.TaskGroup() as sessions:
            for number, (start_s, session) in enumerate(schedule):
                await asyncio.sleep(max(0.0, began_s + start_s - now_s()))
                if places is not None:
                    await places.acquire()
                sessions.create_task(self._session(_Live(number, session), places))

    async def _session(self, live: _Live, places: asyncio.Semaphore | None) -> None:
        lines: dict[str, list[int]] = {}
        for index, call in enumerate(live.session.calls):
            lines.setdefault(call.line, []).append(index)
            live.done[index] = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                for number, indices in enumerate(lines.values()):
                    group.create_task(self._line(live, number, indices))
        finally:
            if places is not None:
                places.release()

    async def _line(self, live: _Live, line: int, indices: Sequence[int]) -> None:
        """One chain of calls, then what it gives up of them if the session came to nothing."""
        for index in indices:
            ready = await self._released(live, index)
            if ready is None:
                break
            live.tried.add(index)
            await self._call(live, line, index, *ready)
        for index in indices:
            if index not in live.tried:
                self._sent(live.session, Sent(live.number, line, index, now_s(), None))
                live.done[index].set()

    async def _released(self, live: _Live, index: int) -> tuple[float, bytes] | None:
        """Wait for the call's turn: when it is due, and its body. None if the session was given up meanwhile."""
        call = live.session.calls[index]
        for other in call.waits_for:
            await live.done[other].wait()
        due_s = now_s() + (call.gap_s if self._gap_cap_s is None else min(call.gap_s, self._gap_cap_s))
        if live.aborted:
            return None
        # Made in the gap, so that a long prompt delays nothing.
        body = completion_body(call.model, self._prompts.prompt(live.session, index, live.text), call.output_tokens)
        await asyncio.sleep(max(0.0, due_s - now_s()))
        return None if live.aborted else (due_s, body)

    async def _call(self, live: _Live, line: int, index: int, due_s: float, body: bytes) -> None:
        answer = await self._client.send(live.session.id, body)
        live.text.responses[index] = answer.output
        if answer.outcome != "completed":
            live.aborted = True
        self._sent(live.session, Sent(live.number, line, index, due_s, answer))
        live.done[index].set()
