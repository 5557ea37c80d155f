"""A recording: records on their way to one reader, in order, through a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from talaria.gpu.protocol import records
from talaria.report.declog import as_line, router_record

MOST_BYTES: Final = 512 * 2**20
"""Waiting for the reader; with more the recording ends."""
MOST_AT_ONCE: Final = 1000


class Recording:
    """It is a ``report.declog.RouterLog``, so that a ``RecordingRouter`` can write to it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.open = True
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._most_bytes = most_bytes
        self._waiting_bytes = 0

    def add(self, record: records.Record) -> None:
        if not self.open:
            return
        line = records.encode(record)
        self._waiting_bytes += len(line)
        if self._waiting_bytes > self._most_bytes:
            self._queue.put_nowait(records.encode(records.Broken(f"the reader was {self._most_bytes} bytes behind")))
            self.close()
            return
        self._queue.put_nowait(line)

    def router(self, method: str, arguments: Sequence[Any], result: Any, now_s: float) -> None:
        if self.open:
            self.add(records.DecisionLine(as_line(router_record(method, arguments, result, now_s))))

    def close(self) -> None:
        """Nothing more comes."""
        if self.open:
            self.open = False
            self._queue.put_nowait(None)

    async def next(self) -> bytes | None:
        """The next lines, as many as there are; None at the end."""
        first = await self._queue.get()
        if first is None:
            return None
        lines = [first]
        while not self._queue.empty() and len(lines) < MOST_AT_ONCE:
            line = self._queue.get_nowait()
            if line is None:
                self._queue.put_nowait(None)
                break
            lines.append(line)
        read = b"".join(lines)
        self._waiting_bytes -= len(read)
        return read
