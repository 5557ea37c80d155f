"""What an agent tells its gateway over the link, and when: snapshots as slots open, on changes of health, and as heartbeat (SPEC §3.5)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.agent.snapshots import SnapshotWriter
from talaria.gpu.protocol import agent as wire
from talaria.policy.calls import LineKey
from talaria.policy.codec import CODEC
from talaria.policy.instance import Command, EngineView, Event, RoundSummary
from talaria.policy.knobs import Knobs
from talaria.report.declog import as_line, slots_knobs_record, slots_record

HEARTBEAT_S: Final = 4.0
"""At the longest: it must come before a router takes the last snapshot for stale."""
MIN_INTERVAL_S: Final = 1.0
"""Slots that open sooner after the last snapshot wait for the heartbeat."""
MOST_UNSENT: Final = 100_000
"""Messages that wait for a gateway that does not read; with more the link is given up."""

_encode = msgspec.msgpack.Encoder().encode


class Outbox:
    """Messages to the gateway of the link that is up; without one they are nobody's."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] | None = None

    @property
    def linked(self) -> bool:
        return self._queue is not None

    def open(self) -> asyncio.Queue[bytes | None]:
        """A link is up, in place of an earlier one, whose queue ends with None."""
        self.close()
        self._queue = asyncio.Queue()
        return self._queue

    def serves(self, queue: asyncio.Queue[bytes | None]) -> bool:
        """Whether this is the link that is up."""
        return queue is self._queue

    def close(self) -> None:
        if self._queue is not None:
            self._queue.put_nowait(None)
            self._queue = None

    def send(self, message: wire.FromAgent) -> None:
        if self._queue is None:
            return
        if self._queue.qsize() >= MOST_UNSENT:
            self.close()
            return
        self._queue.put_nowait(_encode(message))


class Telemetry:
    """The instance's ``Host``."""

    def __init__(self, outbox: Outbox, clock: Callable[[], float]) -> None:
        self.instance: AgentInstance | None = None
        """Set before anything happens to it."""
        self.recording = False
        self.calls: Counter[str] = Counter()
        """Ended calls by outcome."""
        self.switches: Counter[str] = Counter()
        """By path."""
        self.moved_bytes: Counter[str] = Counter()
        """Of weights at switches: ``d2d`` on the device, ``h2d`` from the host."""
        self._outbox = outbox
        self._writer = SnapshotWriter()
        self._clock = clock
        self._paced_anew = asyncio.Event()

    # --- the instance's host ---------------------------------------------------------------------------------------

    def call_ended(self, ended: wire.CallEnded, key: LineKey) -> None:
        self.calls[ended.outcome] += 1
        self._outbox.send(ended)

    def round_closed(self, summary: RoundSummary) -> None:
        self._outbox.send(wire.RoundClosed(as_json(summary)))

    def switched(self, switch: wire.Switched) -> None:
        self.switches[switch.path] += 1
        self.moved_bytes.update(d2d=switch.d2d_bytes, h2d=switch.h2d_bytes)
        self._outbox.send(switch)

    def phase(self, name: str, model: str, started_s: float, ended_s: float) -> None:
        self._outbox.send(wire.Phase(name, model, started_s, ended_s))

    def stepped(self, event: Event, view: EngineView, now_s: float, commands: list[Command]) -> None:
        if self.recording:
            assert self.instance is not None
            record = slots_record(self.instance.id, event, view, now_s, commands)
            self._outbox.send(wire.Decision(as_line(record).encode()))

    def tuned(self, knobs: Knobs, now_s: float) -> None:
        if self.recording:
            assert self.instance is not None
            self._outbox.send(wire.Decision(as_line(slots_knobs_record(self.instance.id, knobs, now_s)).encode()))
        self._paced_anew.set()

    def slot_opened(self) -> None:
        assert self.instance is not None
        if self._clock() - self.instance.published_s >= MIN_INTERVAL_S:
            self.publish()

    def health_changed(self) -> None:
        self.publish()

    # --- snapshots -------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        if self.instance is not None and self._outbox.linked:
            self._outbox.send(wire.Snapshot(self._writer.write(self.instance.snapshot())))

    async def heartbeats(self) -> None:
        """Until cancelled: what has changed since its last snapshot is published, what has not is only known to be alive."""
        assert self.instance is not None
        while True:
            self._paced_anew.clear()
            heartbeat_s = min(HEARTBEAT_S, 0.8 * self.instance.knobs.stale_after_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._paced_anew.wait(), heartbeat_s)
            if self._clock() - self.instance.published_s < 0.5 * heartbeat_s:
                continue
            if self.instance.changed:
                self.publish()
            else:
                self._outbox.send(wire.Beat(self.instance.healthy()))


def as_json(value: object) -> bytes:
    """A policy value as it travels."""
    return json.dumps(CODEC.encode(value), separators=(",", ":"), allow_nan=False).encode()
