"""Keeps finished KV pages in the instance's host pool and brings them back: SGLang's ``UnifiedCacheLinker``, on every rank's scheduler.

SGLang loads it by flag (``engine.command``), asks it for prefixes that its radix tree lacks and offers it every new node. Hooks tell
it what the interface does not: a node's whole path, and which requests still wait for a prefix.

Of the session-aware prefix cache of SPEC §5.5 SGLang 0.5.23 has no class: this and its KV events (``kv.events``) are in its place.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from typing import Any, Final

from talaria.gpu import compat, seams
from talaria.gpu.memory.checkpoints import Checkpoints
from talaria.gpu.memory.client import PoolClient
from talaria.gpu.memory.cpu import unmap
from talaria.gpu.memory.layout import PageLayout
from talaria.gpu.memory.mover import Mover
from talaria.gpu.memory.restores import Restores
from talaria.gpu.modelfiles import revision
from talaria.gpu.protocol import memory as protocol
from talaria.gpu.protocol.engine import MODEL_VARIABLE

_FLUSH_S: Final = 45.0
"""Copies that take longer hang: the engine ends with an error that says so, before an agent gives it up for not answering."""


class HostLinker:
    """One rank's end of the pool. ``SGLang`` calls everything from its scheduler's thread."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None, forward_stream: Any = None
    ) -> None:
        """Raises OSError or ValueError where the engine cannot be served from the agent's pool; it does not start then."""
        kv = self._kv = compat.kv_pool(params, components)
        self.pools = kv.by_name
        self.forward_stream = forward_stream
        join = protocol.Join(
            rank=kv.rank, ranks=kv.ranks, model=os.environ.get(MODEL_VARIABLE, ""), revision=revision(server_args.model_path),
            dtype=kv.dtype, page_tokens=kv.page_tokens, layers=kv.layers, family=kv.family,
            page_bytes=sum(buffer.page_bytes for buffer in kv.buffers), checkpoint_pages=0,
        )  # fmt: skip
        self._client = PoolClient(os.environ[protocol.SOCKET_VARIABLE], join, self._granted)
        partition_bytes = self._client.partition_bytes
        self._address = self._client.pool.map(kv.rank * partition_bytes, partition_bytes)
        mover = self._mover = self.mover(kv.device)
        mover.pin(self._address, partition_bytes)
        layout = PageLayout(kv.buffers, self._client.slab_bytes, self._address)
        self._checkpoints = Checkpoints(layout, mover.stream(), self._saved)
        self._restores = Restores(layout, mover.stream(), self._client)
        self.layer_done_counter = self._restores.layers
        self._path: tuple[list[str], Any] | None = None

    @staticmethod
    def mover(device: str) -> Mover:
        if device == "cpu":
            from talaria.gpu.memory.cpu import CpuMover

            return CpuMover()
        from talaria.gpu.memory.cuda import CudaMover

        return CudaMover()

    def _granted(self, number: int, pages: array[int], slabs: array[int], kept: bool) -> None:
        self._checkpoints.granted(number, pages, slabs, kept)

    def _saved(self, number: int, complete: bool) -> None:
        self._client.saved(number, complete=complete)

    # --- to the host -----------------------------------------------------------------------------------------------

    def offers(self, digests: list[str], device_indices: Any) -> None:
        """What comes next is the end of this path, whose digests and token slots these are."""
        self._path = digests, device_indices

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Never refused here, since ranks would differ; what is not kept ends as a failure."""
        path, self._path = self._path, None
        if path is None or not path[0] or len(path[1]) != len(path[0]) * self._kv.page_tokens:
            self._checkpoints.refuse()
            return True
        digests, device_indices = path
        self._checkpoints.offer(
            self._pages(device_indices), compat.written_events(self), lambda number: self._client.save(number, digests)
        )
        return True

    def num_completed_offloads(self) -> int:
        return self._checkpoints.completed()

    def pop_completed_offload(self) -> bool:
        return self._checkpoints.pop()

    # --- to the device ---------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return list(range(1, self._restores.find(rid, transfers[0].keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self._restores.queue(rid, self._pages(transfers[0].device_indices))
        return True

    def waits(self, requests: Any) -> None:
        """Only these requests may still ask for what was found for them."""
        self._restores.keep(requests)

    def start_layer_wise_loading(self) -> int:
        return self._restores.start(compat.written_events(self))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._restores.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._restores.cancel(rid)

    def _pages(self, token_slots: Any) -> Sequence[int]:
        pages: list[int] = (token_slots[:: self._kv.page_tokens] // self._kv.page_tokens).tolist()
        return pages

    # --- ends ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The switch barrier: SGLang flushes before its KV is released. The pool keeps what it has.

        Raises TimeoutError, which ends the engine.
        """
        until_s = time.monotonic() + _FLUSH_S
        self._checkpoints.drain(until_s)
        self._restores.drain(until_s)
        self._client.drain()

    def close(self) -> None:
        self.reset()
        self._checkpoints.close()
        self._restores.close()
        self._client.close()
        self._mover.unpin(self._address)
        unmap(self._address, self._client.partition_bytes)


def _offload(wrapper: Any, node_id: Any, transfers: list[Any]) -> None:
    if isinstance(wrapper.cache_linker, HostLinker):
        wrapper.cache_linker.offers(*compat.device_path(wrapper.cache, node_id, transfers))


def _start(wrapper: Any) -> None:
    if isinstance(wrapper.cache_linker, HostLinker):
        wrapper.cache_linker.waits(wrapper.hit_markers)


compat.enlist_linker(HostLinker)
HOOKS: Final = (
    compat.Hook(seams.OFFLOAD_NODE, "before", _offload),
    compat.Hook(seams.START_LOADS, "before", _start),
)
