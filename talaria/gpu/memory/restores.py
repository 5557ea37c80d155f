"""A rank's copies from the host pool: found for a request, queued by SGLang, begun with its batch, and awaited layer by layer."""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, Protocol

from talaria.gpu.memory.layout import PageLayout
from talaria.gpu.memory.mover import CopyFailed, Event, Stream

_POLL_S: Final = 0.002
_log = logging.getLogger(__name__)


class Pool(Protocol):
    """The store, as a rank asks it (``PoolClient``)."""

    def find(self, request: str, digests: Sequence[str]) -> tuple[int, array[int]]: ...

    def pin(self, request: str, pages: int) -> None: ...

    def done(self, request: str, *, complete: bool = True) -> None: ...


class LayerEvents:
    """What SGLang's KV pools ask before they give out a layer's buffers (its ``LayerDoneCounter``)."""

    def __init__(self) -> None:
        self.consumer_index = -1
        self._batches: dict[int, list[Event]] = {}

    def begin(self, index: int, events: list[Event]) -> None:
        self._batches[index] = events

    def end(self, index: int) -> list[Event]:
        return self._batches.pop(index, [])

    def idle(self) -> bool:
        """Whether all that has begun has ended."""
        return all(event.done() for events in self._batches.values() for event in events)

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Compute of the current batch waits for this layer; whether it came is for ``Restores.finish`` to say."""
        events = self._batches.get(self.consumer_index, ())
        if layer < len(events):
            with contextlib.suppress(CopyFailed):
                events[layer].hold_compute()


class _Queued(NamedTuple):
    request: str
    device_pages: Sequence[int]
    slabs: array[int]


class Restores:
    def __init__(self, layout: PageLayout, stream: Stream, pool: Pool) -> None:
        self.layers = LayerEvents()
        self._layout, self._stream, self._pool = layout, stream, pool
        self._found: dict[str, array[int]] = {}
        """By request, the slabs of what it may restore."""
        self._queued: dict[str, _Queued] = {}
        self._running: dict[int, list[str]] = {}
        """By batch, its requests."""
        self._failed: set[int] = set()
        self._declined: set[str] = set()
        """Requests for which a restore has failed since the last flush: they recompute."""
        self._batch = -1

    def find(self, request: str, digests: Sequence[str]) -> int:
        """How many of these pages, which follow what the device holds, can be restored on this rank."""
        if request in self._declined:
            return 0
        pages, slabs = self._pool.find(request, digests)
        self._found.pop(request, None)
        if pages:
            self._found[request] = slabs
        return pages

    def keep(self, requests: Collection[str]) -> None:
        """All others that have been found are not going to be restored."""
        for request in [request for request in self._found if request not in requests and request not in self._queued]:
            self._forget(request)

    def queue(self, request: str, device_pages: Sequence[int]) -> None:
        """Restore the first of what was found into these pages, with the next batch."""
        slabs = self._found.get(request, array("I"))[: len(device_pages) * self._layout.page_slabs]
        self._queued[request] = _Queued(request, device_pages, slabs)

    def cancel(self, request: str) -> bool:
        """False if it has begun already, or was never queued."""
        if self._queued.pop(request, None) is None:
            return False
        self._forget(request)
        return True

    def start(self, ready: Sequence[Any]) -> int:
        """Begin what is queued behind ``ready``, as a batch whose number is returned; -1 if nothing is."""
        if not self._queued:
            return -1
        self._batch += 1
        queued, self._queued = list(self._queued.values()), {}
        pages: list[int] = []
        slabs = array("I")
        for request, device_pages, places in queued:
            if len(places) < len(device_pages) * self._layout.page_slabs:  # the other ranks have it: they must hear that it failed
                _log.error("talaria: %s is to be restored, but was not found on this rank", request)
                self._failed.add(self._batch)
                continue
            self._pool.pin(request, len(device_pages))
            pages += device_pages
            slabs += places
        self._running[self._batch] = [item.request for item in queued]
        events: list[Event] = []
        try:
            for layer in range(self._layout.layers):
                events.append(self._stream.copy(self._layout.to_device(pages, slabs, layer), ready))
        except CopyFailed as error:  # the layers that it has not begun with are lacking: told when the batch ends
            _log.error("talaria: a prefix cannot be restored: %s", error)
            self._failed.add(self._batch)
        self.layers.begin(self._batch, events)
        return self._batch

    def finish(self, batch: int) -> bool:
        """Wait for a batch; whether all of it came."""
        complete = batch not in self._failed
        self._failed.discard(batch)
        for event in self.layers.end(batch):
            try:
                event.wait()
            except CopyFailed as error:
                _log.error("talaria: a prefix was not restored: %s", error)
                complete = False
        requests = self._running.pop(batch, [])
        if not complete:
            self._declined.update(requests)
        for request in requests:
            self._forget(request, complete=complete)
        return complete

    def drain(self, until_s: float) -> None:
        """Wait for what runs, and forget the rest. Raises TimeoutError at ``until_s`` (``time.monotonic()``)."""
        while not self.layers.idle():
            if time.monotonic() >= until_s:
                raise TimeoutError("copies of KV from the host have not ended")
            time.sleep(_POLL_S)
        for batch in list(self._running):
            self.finish(batch)
        self._queued.clear()
        self._declined.clear()
        self.keep(())

    def close(self) -> None:
        """Once it is drained."""
        self._stream.close()

    def _forget(self, request: str, *, complete: bool = True) -> None:
        self._found.pop(request, None)
        self._pool.done(request, complete=complete)
