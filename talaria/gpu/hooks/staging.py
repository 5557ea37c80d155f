"""Stages the next model in the free KV of the one that serves, on every rank (SPEC §5.3): the arena's wishes, carried out by the pages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from talaria.gpu import compat, seams
from talaria.gpu.hooks import arena, placing
from talaria.gpu.hooks.allocator import LowPagesAllocator
from talaria.gpu.hooks.soil import Soil
from talaria.gpu.memory.gather import Image, Ledger
from talaria.gpu.memory.stager import KvRegion, Stager
from talaria.gpu.memory.tail import Figures, Tail
from talaria.gpu.protocol import arena as protocol
from talaria.substrate.pages import Extent


class Staging:
    """Implements ``arena.Stages`` for a window whose KV is ``region``, with ``tail`` as its pages."""

    def __init__(self, attached: arena.Attached, region: KvRegion, tail: Tail, streams: Callable[[], Sequence[Any]]) -> None:
        self._attached, self._region, self._tail = attached, region, tail
        self._streams = streams
        """Of SGLang, which write KV: those of now, since its loop may begin with another than it was made with."""
        self._on_cuda = attached.device.type == "cuda"
        self._copies = Soil(attached.mover.stream(), attached.window, region, attached.arena.chunk_bytes)

    def serve(self) -> None:
        self._copies.forget(soiled=self._on_cuda and bool(self._attached.empty))
        stager = Stager(self._attached.arena, self._attached.window, self._region, self._copies)
        self._tail.open(stager, self._written if self._on_cuda else tuple, self._tell)

    def stage(self, model: str, image: Image, bytes_per_s: float) -> None:
        self._tail.stage(model, image, bytes_per_s)

    def unstage(self) -> None:
        self._tail.unstage()

    def park(self) -> Ledger:
        return self._tail.park()

    def wipe(self, pages: list[Extent]) -> None:
        """What is staged in them is no KV. Behind this comes, on the same stream, all that SGLang does with the pages.

        On CPUs it is what free KV is, since kernels there leave alone what lies behind a sequence in its last page.
        """
        attached, byte = self._attached, 0 if self._on_cuda else self._attached.empty
        for address in self._copies.take(pages):
            placing.tensor_at(address, (attached.arena.chunk_bytes,), torch.uint8, attached.device).fill_(byte)

    def _tell(self, figures: Figures) -> None:
        with contextlib.suppress(OSError):  # the engine hears of it at its next switch
            self._attached.tenant.tell(protocol.Staged(*figures))

    def _written(self) -> list[Any]:
        """A call that has ended may have one more step under way, which writes to pages that are free already."""
        return [stream.record_event() for stream in self._streams()]


def _made(_result: None, scheduler: Any, *_arguments: Any, **_named: Any) -> None:
    """Everything is there, and the model is active."""
    attached, allocator = arena.attached, scheduler.token_to_kv_pool_allocator
    if attached is None or attached.kv is None or not isinstance(allocator, LowPagesAllocator):
        return
    assert allocator.tail is not None
    staging = Staging(attached, attached.kv, allocator.tail, lambda: (scheduler.forward_stream, scheduler.schedule_stream))
    attached.staging, allocator.wipe = staging, staging.wipe
    staging.serve()


HOOKS: Final = (compat.Hook(seams.SCHEDULER_MADE, "after", _made),)
