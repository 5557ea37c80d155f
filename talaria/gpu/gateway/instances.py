"""What the gateway keeps of one instance: its newest telemetry, in the router's numbers, and what an administrator said of it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from talaria.gpu.gateway.agents import Agent
from talaria.gpu.gateway.snapshots import SnapshotReader
from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol.agent import now_s
from talaria.gpu.protocol.engine import ABI
from talaria.policy.snapshot import InstanceSnapshot

CLOCK_TOLERANCE_S: Final = 1.0

_log = logging.getLogger("talaria.gateway")


class Numbering:
    """The router's numbers of submissions to one instance, and the agent's, which begin anew when it does."""

    def __init__(self) -> None:
        self._last = 0
        self._ahead = 0
        """The router's number less the agent's."""

    def sent(self, seq: int) -> int:
        """The agent's number of the router's ``seq``."""
        self._last = max(self._last, seq)
        return seq - self._ahead

    def linked(self, seen_seq: int) -> None:
        """A link begins, and the agent counts from here. A smaller number than ours: it has yet to see what is on its way."""
        if seen_seq == 0 or seen_seq + self._ahead > self._last:
            self._ahead = self._last - seen_seq

    def seen(self, seen_seq: int) -> int:
        """The router's number of the agent's ``seen_seq``."""
        return seen_seq + self._ahead

    def unseen(self, seen_seq: int) -> range:
        """Numbers that were sent and are beyond ``seen_seq``; all are the router's."""
        return range(seen_seq + 1, self._last + 1)

    def forget(self) -> None:
        """A new router begins from zero; ``linked`` comes before its first call."""
        self._last = self._ahead = 0


class InstanceState:
    """What the dispatcher keeps of one instance."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.hello: wire.AgentHello | None = None
        self.snapshot: InstanceSnapshot | None = None
        """The newest, as the agent said it."""
        self.barred = False
        """The router was told that it is not healthy, which only telemetry can mend."""
        self.numbers = Numbering()
        self.reader = SnapshotReader()
        self.drained = False
        self.closed: set[str] = set()
        """Models that are not to be placed here."""
        self.taken_over = False
        self.fresh_link = False
        self.links = 0
        """How many there have been."""
        self.version = self.version_ahead = 0
        self.heard_s = 0.0
        self.ready = asyncio.Event()
        """A snapshot has come since the last hello."""

    @property
    def healthy(self) -> bool:
        return self.agent.connected and not self.barred and not self.drained and self.snapshot is not None and self.snapshot.healthy

    def serves(self, model: str) -> bool:
        return self.snapshot is not None and model in self.snapshot.models

    def greeted(self, hello: wire.AgentHello) -> None:
        """A link begins. Raises ValueError where it is not the agent that is expected."""
        name = self.agent.name
        if hello.abi != ABI:
            raise ValueError(f"the agent speaks version {hello.abi} of the protocol, this gateway {ABI}")
        if hello.instance != name:
            raise ValueError(f"the agent at {self.agent.url} is {hello.instance!r}")
        if abs(hello.now_s - now_s()) > CLOCK_TOLERANCE_S:
            _log.warning("event=clock_differs instance=%s seconds=%.3f", name, hello.now_s - now_s())
        self.hello, self.fresh_link = hello, True
        for model in self.closed:  # a new agent opens all it may
            self.agent.send(wire.Close(model))
        self.ready.clear()

    def void(self, seq: int) -> None:
        """Nothing more comes of the router's submission ``seq``; one that the instance has seen is not affected."""
        self.agent.send(wire.Void(self.numbers.sent(seq)))

    def begin_anew(self) -> None:
        """With a new router; what an administrator said holds."""
        self.numbers.forget()
        self.ready.clear()
        self.hello, self.snapshot, self.version, self.version_ahead = None, None, 0, 0

    def translated(self, snapshot: InstanceSnapshot) -> InstanceSnapshot:
        """The snapshot in the router's numbers, newer than any before, and without what an administrator has closed."""
        if self.fresh_link:
            self.fresh_link = False
            self.numbers.linked(snapshot.seen_seq)
        if snapshot.version + self.version_ahead <= self.version:
            self.version_ahead = self.version + 1 - snapshot.version
        self.version = snapshot.version + self.version_ahead
        models = snapshot.models
        if self.closed:
            models = {name: model for name, model in models.items() if name not in self.closed}
        return replace(
            snapshot, version=self.version, seen_seq=self.numbers.seen(snapshot.seen_seq), models=models,
            healthy=snapshot.healthy and not self.drained,
        )  # fmt: skip
