"""One call at the stub: where it runs, and the answer to its client."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.gpu.stub.engine import CallError, Engine, Run
from tests.gpu.stub.formats import Format
from tests.gpu.stub.hold import Hold
from tests.gpu.stub.http import Connection


class Showing:
    """Calls whose clients are to see something new, at the end of this turn of the event loop."""

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}

    def add(self, call: Call) -> None:
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._show)
        self._calls[call] = None

    def discard(self, call: Call) -> None:
        self._calls.pop(call, None)

    def _show(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls:
            call.show()


class Call:
    """The answer of most streams begins with the first token, so that an error before it has a status of its own."""

    def __init__(
        self, kind: type[Format], body: dict[str, Any], number: str, prompt: bytes, limit: int, engine: Engine, to: Connection,
        showing: Showing,
    ) -> None:  # fmt: skip
        self.run = Run(number, prompt, limit, bool(body.get("ignore_eos")), self.fail)
        self._form = kind(body, self.run)
        self._streams = bool(body.get("stream"))
        self._engine, self._to, self._showing = engine, to, showing
        self._hold: Hold | None = None
        self._began = False
        self._shown = 0
        """Tokens."""

    def begin(self, hold: Hold | None) -> None:
        """Where ``hold`` says so, or at once."""
        opening = self._form.opening() if self._streams else None
        if opening is not None:
            self._to.begin(opening)
            self._began = True
        try:
            if hold is None:
                self._engine.segment(self.run, self.run.limit, lambda over: self._showing.add(self))
            else:
                hold.begin(self.run, lambda: self._showing.add(self))
                self._hold = hold
        except CallError as error:
            self.fail(error)

    def show(self) -> None:
        """What there is, and the end, if that has come."""
        run, form = self.run, self._form
        if not self._streams:
            if run.finish is not None:
                self._engine.ended += 1
                self._to.answer(200, form.whole())
            return
        words, first = run.output[self._shown :], not self._shown
        self._shown = len(run.output)
        data = (form.head() if first else b"") + b"".join(map(form.token, words))
        over = run.finish is not None and run.id not in self._engine.running
        if over:
            self._engine.ended += 1
            data += form.tail()
        if self._began:
            (self._to.end if over else self._to.more)(data)
        elif over:
            self._to.begin(data)
            self._to.end(b"")
        else:
            self._to.begin(data)
        self._began = True

    def fail(self, error: CallError) -> None:
        """Somebody ends the call before its time."""
        self._leave(error)
        if self._began:
            self._to.end(self._form.error_event(error.status, error.why))
        else:
            self._to.answer(error.status, self._form.error(error.status, error.why))

    def left(self) -> None:
        self._leave(None)

    def _leave(self, error: CallError | None) -> None:
        self._engine.leave(self.run)
        self._showing.discard(self)
        if self._hold is not None:
            self._hold.end(self.run, error)
        self._engine.ended += 1
