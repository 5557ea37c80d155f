"""The way back to one client: nothing is sent before there is something to say, so that an error can still be a status."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from talaria.gpu.dialects import KEEP_ALIVE, Endpoint, Problem
from talaria.gpu.protocol.records import CALL_HEADER
from talaria.gpu.serving import Stream, client_may_go


class Answer:
    """The answer to ``request``. A stream that has been silent for ``keep_alive_s`` says so with a comment."""

    def __init__(self, request: web.BaseRequest, endpoint: Endpoint, call: int, keep_alive_s: float) -> None:
        self._request, self._endpoint, self._call, self._keep_alive_s = request, endpoint, call, keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._written_s = 0.0
        self._between_events = True

    @property
    def began(self) -> bool:
        return self._stream is not None

    def expected(self) -> None:
        """A stream will come: from now on its client is told that it is not forgotten."""
        self._written_s = self._loop.time()
        self._tick()

    async def write(self, data: bytes) -> None:
        """More of the stream. Raises ConnectionError once the client is gone."""
        if self._stream is not None:
            if not self.give(data):
                await self.drained()
            return
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", CALL_HEADER: str(self._call)}
        self._stream = Stream(self._request, 200, headers)
        self._wrote(data)
        self._stream.begin(data)
        if self._timer is None:
            self._tick()

    def give(self, data: bytes) -> bool:
        """``write`` where the stream has begun; whether more may follow before ``drained``."""
        assert self._stream is not None
        self._wrote(data)
        return self._stream.give(data)

    async def drained(self) -> None:
        assert self._stream is not None
        await self._stream.drained()

    def _wrote(self, data: bytes) -> None:
        self._written_s = self._loop.time()
        self._between_events = data.endswith((b"\n\n", b"\r\n\r\n"))

    async def whole(self, status: int, headers: dict[str, str], body: bytes) -> web.StreamResponse:
        """An answer that is no stream; of a stream that had begun, its end as an error."""
        response = web.Response(status=status, headers={**headers, CALL_HEADER: str(self._call)}, body=body)
        with client_may_go():
            await response.prepare(self._request)
            await response.write_eof()
        return response

    async def fail(self, problem: Problem) -> web.StreamResponse:
        """An error, in the client's format: a status, or the stream's last event."""
        if self._stream is None:
            headers = {"content-type": "application/json", **problem.headers}
            return await self.whole(problem.status, headers, self._endpoint.error_body(problem))
        if not self._between_events:
            await self.write(b"\n\n")
        await self.write(self._endpoint.error_event(problem))
        return await self.end()

    async def end(self) -> web.StreamResponse:
        """The stream is complete."""
        assert self._stream is not None
        self.close()
        return self._stream.end()

    def close(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now_s = self._loop.time()
        due_s = self._written_s + self._keep_alive_s
        if now_s >= due_s:
            if self._stream is None:
                self._comment = self._loop.create_task(self._begin())
            elif self._between_events and not self._stream.full:  # else its client does not read
                self._say_comment()
            due_s = now_s + self._keep_alive_s
        self._timer = self._loop.call_at(due_s, self._tick)

    async def _begin(self) -> None:
        """The engine has said nothing yet."""
        if self._stream is None and self._timer is not None:  # else it ended, or went on, just now
            with contextlib.suppress(ConnectionError):  # whoever waits for the engine learns of it too
                await self.write(KEEP_ALIVE)

    def _say_comment(self) -> None:
        assert self._stream is not None
        with contextlib.suppress(ConnectionError):
            self._stream.give(KEEP_ALIVE)
