"""The product's own linker on a CPU, for tests: over a KV pool that is overwritten whenever it is given up, and with faults on demand.

Slots are reused with their old bytes: without the overwriting, a mover that copies nothing would look right.
"""

from __future__ import annotations

import os
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

from talaria.gpu import compat
from talaria.gpu.hooks import arena
from talaria.gpu.hooks.linker import HostLinker
from talaria.gpu.hooks.staging import Staging
from talaria.gpu.memory.cpu import CpuMover, CpuStream
from talaria.gpu.memory.mover import Copies, Mover, Stream
from talaria.substrate.staging import StagingMap

LAG_PAGES = 2
LATE_S = 0.2
"""Longer than a call's next messages are under way."""
AGREED_PAGES = 2


def fault() -> str:
    """What the test wants to go wrong now.

    ``idle``: copies do nothing; ``still``: those of KV. ``broken``: restores fail. ``stuck``: checkpoints do not end. ``nonsense``: ranks
    say what is no message. Of rank 1 alone, ``lag``: it finds less; ``late``: its checkpoints take longer; ``differ``: from
    ``AGREED_PAGES`` on it hashes differently; ``lost``: what it saves behind them is not kept.
    """
    return Path(os.environ["TALARIA_TEST_FAULT"]).read_text()


class _Stream(CpuStream):
    def __init__(self, *, restores: bool) -> None:
        self._restores = restores
        super().__init__()

    def move(self, copies: Copies) -> None:
        while (now := fault()) == "stuck" and not self._restores:
            time.sleep(0.01)
        if now == "broken" and self._restores:
            raise RuntimeError("the test wants it to fail")
        if now == "late" and not self._restores and compat.tp_rank()[0] == 1:
            time.sleep(LATE_S)
        if now not in ("idle", "still"):
            super().move(copies)


class _Mover(CpuMover):
    def __init__(self) -> None:
        self._streams = 0

    def stream(self) -> Stream:
        self._streams += 1
        return _Stream(restores=self._streams > 1)


class FaultyLinker(HostLinker):
    """Copies go wrong, and rank 1 knows less of the host's pool, if the test wants it."""

    @staticmethod
    def mover(device: str) -> Mover:
        return _Mover()

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        found = super().lookup(rid, transfers)
        return found[:-LAG_PAGES] if fault() == "lag" and self._kv.rank == 1 else found


class ArenaLinker(FaultyLinker):
    """Every flush fills the KV in the arena with NaN, but for what is staged there. A switch does that by itself where it is checked."""

    def reset(self) -> None:
        super().reset()
        attached = arena.attached
        assert attached is not None and isinstance(attached.staging, Staging)
        tail = attached.staging._tail
        with tail._changed:  # nothing more is staged meanwhile
            if tail._stager is None:  # the engine is parked: there is nothing behind its window
                return
            staged = _staged_pages(tail._stager.map)
            for address, nbytes, page_bytes in attached._kv_bytes:
                for page in range(1, nbytes // page_bytes):  # page 0 is SGLang's own
                    if page not in staged:
                        attached.mover.fill(address + page * page_bytes, page_bytes, 0xFF)


def _staged_pages(staging: StagingMap) -> set[int]:
    """Pages with rows of a chunk that is staged or being copied."""
    writing = staging.in_flight
    chunks = [chunk for first, count in staging._clean for chunk in range(first, first + count)] + [writing] * (writing is not None)
    pages: set[int] = set()
    for row in {chunk // staging.layers for chunk in chunks}:
        end = staging._layer_bytes - row * staging.chunk_bytes
        pages.update(range((end - staging.chunk_bytes) // staging.page_bytes, -(-end // staging.page_bytes)))
    return pages


class PoisonedLinker(FaultyLinker):
    """Every flush fills the device pool with NaN."""

    def reset(self) -> None:
        super().reset()
        pool = next(iter(self.pools.values()))
        for rows in pool.kv_buffer if self._kv.family == "mla" else (*pool.k_buffer, *pool.v_buffer):
            rows.fill_(float("nan"))

    def offers(self, digests: list[str], device_indices: Any) -> None:
        if fault() == "differ" and self._kv.rank == 1:
            digests = digests[:AGREED_PAGES] + [digest[::-1] for digest in digests[AGREED_PAGES:]]
        if fault() == "nonsense":
            with suppress(OSError):  # it is cut off already
                self._client._socket.sendall(b"\xff\xff\xff\xff")
        super().offers(digests, device_indices)

    def _granted(self, number: int, pages: array[int], slabs: array[int], kept: bool) -> None:
        if fault() == "lost" and self._kv.rank == 1 and pages and pages[0] >= AGREED_PAGES:
            slabs = slabs[:-1]
        super()._granted(number, pages, slabs, kept)


def _attend_to_latents() -> None:
    """SGLang's attention for CPUs reads a latent in its absorbed form only: here prefill takes that too, as SGLang has it where it must not
    depend on the batch."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


_attend_to_latents()
