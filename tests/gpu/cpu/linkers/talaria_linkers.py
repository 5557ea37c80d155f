"""The product's own linker on a CPU, for tests: over a KV pool that is overwritten whenever it is given up, and with faults on demand.

Slots are reused with their old bytes: without the overwriting, a mover that copies nothing would look right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from talaria.gpu.hooks.linker import HostLinker
from talaria.gpu.memory.cpu import CpuMover, CpuStream
from talaria.gpu.memory.mover import Copies, Mover, Stream

LAG_PAGES = 2


def fault() -> str:
    """What the test wants to go wrong now: ``idle`` (copies do nothing), ``broken`` (restores fail), ``lag`` (rank 1 knows less)."""
    return Path(os.environ["TALARIA_TEST_FAULT"]).read_text()


class _Stream(CpuStream):
    def __init__(self, *, restores: bool) -> None:
        self._restores = restores
        super().__init__()

    def move(self, copies: Copies) -> None:
        now = fault()
        if now == "broken" and self._restores:
            raise RuntimeError("the test wants it to fail")
        if now != "idle":
            super().move(copies)


class _Mover(CpuMover):
    def __init__(self) -> None:
        self._streams = 0

    def stream(self) -> Stream:
        self._streams += 1
        return _Stream(restores=self._streams > 1)


class LaggingLinker(HostLinker):
    """Rank 1 knows less of the host's pool, if the test wants it."""

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        found = super().lookup(rid, transfers)
        return found[:-LAG_PAGES] if fault() == "lag" and self._kv.rank == 1 else found


class PoisonedLinker(LaggingLinker):
    """Every flush fills the device pool with NaN."""

    @staticmethod
    def mover(device: str) -> Mover:
        return _Mover()

    def reset(self) -> None:
        super().reset()
        pool = next(iter(self.pools.values()))
        for rows in pool.kv_buffer if self._kv.family == "mla" else (*pool.k_buffer, *pool.v_buffer):
            rows.fill_(float("nan"))
