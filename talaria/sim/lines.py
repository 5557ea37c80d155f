"""The line states that an instance publishes: looked up when a snapshot is made, once for all that has happened since."""

from __future__ import annotations

from talaria.policy.calls import LineKey
from talaria.policy.snapshot import DEVICE, LineState
from talaria.sim.memory import InstanceMemory


class LineBook:
    """Lines served on one instance. Bounded by live sessions: a line is forgotten when its session has ended."""

    def __init__(self, memory: InstanceMemory) -> None:
        self._memory = memory
        self._published: dict[LineKey, LineState] = {}
        """Snapshots hold this very mapping, so it is replaced and never changed."""
        self._used_s: dict[LineKey, float] = {}
        self._stale: dict[LineKey, None] = {}
        """Lines whose state may differ from the published one."""

    def used(self, key: LineKey, now_s: float) -> None:
        """A call of the line has completed here."""
        self._used_s[key] = now_s
        self._stale[key] = None

    def forget(self, key: LineKey) -> bool:
        """Whether the line was known; it is published no more."""
        known = self._used_s.pop(key, None) is not None
        if known:
            self._stale[key] = None
        return known

    def lose_device(self, model: str) -> None:
        """The KV region of ``model`` is released: its lines are what the host registry still has of them."""
        for key, state in self._published.items():
            if state.tier is DEVICE and key.model == model:
                self._stale[key] = None

    def doubt_all(self) -> None:
        """Something was evicted, or the engine died: any state may be wrong."""
        self._stale.update(dict.fromkeys(self._used_s))

    def states(self, now_s: float) -> dict[LineKey, LineState]:
        """The states as they are now; the caller must not change them."""
        if self._stale:
            lines = self._published.copy()
            for key in self._stale:
                used_s = self._used_s.get(key)
                if used_s is None:
                    lines.pop(key, None)
                else:
                    lines[key] = self._memory.line_state(key, used_s, now_s)
            self._stale.clear()
            self._published = lines
        return self._published
