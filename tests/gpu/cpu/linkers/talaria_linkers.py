"""Linkers for tests on a CPU: the product's own over a KV pool that is overwritten whenever it is given up, and one that lies.

Slots are reused with their old bytes: without the overwriting, a mover that copies nothing would look right.
"""

from __future__ import annotations

from typing import Any

from talaria.gpu.hooks.linker import HostLinker
from talaria.gpu.memory.cpu import CpuMover, CpuStream
from talaria.gpu.memory.mover import Copies, Mover


class PoisonedLinker(HostLinker):
    """Every flush fills the device pool with NaN."""

    def __init__(self, server_args: Any, params: Any, **named: Any) -> None:
        super().__init__(server_args, params, **named)
        self._rows = [rows for rows in (*next(iter(self.pools.values())).k_buffer, *next(iter(self.pools.values())).v_buffer)]

    def reset(self) -> None:
        super().reset()
        for rows in self._rows:
            rows.fill_(float("nan"))


class _IdleStream(CpuStream):
    def move(self, copies: Copies) -> None:
        """Says that it has."""


class _IdleMover(CpuMover):
    def stream(self) -> CpuStream:
        return _IdleStream()


class LyingLinker(PoisonedLinker):
    """The control: its mover copies nothing."""

    @staticmethod
    def mover(device: str) -> Mover:
        return _IdleMover()
