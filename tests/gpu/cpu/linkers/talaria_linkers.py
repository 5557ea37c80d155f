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

from talaria.gpu.hooks.linker import HostLinker
from talaria.gpu.memory.cpu import CpuMover, CpuStream
from talaria.gpu.memory.mover import Copies, Mover, Stream

LAG_PAGES = 2
AGREED_PAGES = 2


def fault() -> str:
    """What the test wants to go wrong now.

    ``idle``: copies do nothing. ``broken``: restores fail. ``stuck``: checkpoints do not end. ``nonsense``: ranks say what is no message.
    Of rank 1 alone, ``lag``: it finds less; ``differ``: from ``AGREED_PAGES`` on it hashes differently; ``lost``: what it saves behind
    them is not kept.
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
