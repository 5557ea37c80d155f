"""How far the staging of the next model has come, over all ranks of a group (SPEC §5.3)."""

from __future__ import annotations

import math

from talaria.gpu.agent.host import Staged
from talaria.gpu.protocol import arena as protocol


class Progress:
    """What the ranks of the active model have said since its staging of ``target`` began."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._active = self._target = ""
        self._heard: dict[int, protocol.Staged] = {}

    def begin(self, active: str, target: str) -> None:
        """From now on ``active`` stages ``target``; empty: nothing is staged."""
        if (active, target) != (self._active, self._target):
            self._active, self._target = active, target
            self._heard.clear()

    def heard(self, active: str, rank: int, message: protocol.Staged) -> None:
        """A rank of ``active`` says how far it is. A word about another target, or of a model that is active no longer, comes too late."""
        if active != self._active or not self._target:
            return
        if message.model == self._target:
            self._heard[rank] = message
        elif not message.model:
            self._heard.pop(rank, None)

    def figures(self, active: str | None) -> Staged:
        """While ``active`` is. A rank that has said nothing has staged nothing; a switch waits for the rank that is last."""
        if active != self._active:
            return Staged()
        heard = list(self._heard.values())
        whole = len(heard) == self._ranks
        return Staged(
            target=self._target,
            coverage=min((item.clean_bytes / item.weight_bytes for item in heard), default=0.0) if whole else 0.0,
            weight_bytes=sum(item.weight_bytes for item in heard),
            clean_bytes=sum(item.clean_bytes for item in heard),
            dirty_bytes=sum(item.dirty_bytes for item in heard),
            slack_bytes=sum(item.slack_bytes for item in heard),
            bytes_per_s=sum(item.copied_bytes for item in heard) / (sum(item.copying_s for item in heard) or math.inf),
        )
