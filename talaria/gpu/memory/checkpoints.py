"""A rank's copies to the host pool: what SGLang offers, in the order in which it wants to hear of their ends."""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from talaria.gpu.memory.layout import PageLayout
from talaria.gpu.memory.mover import Stream

_log = logging.getLogger(__name__)


@dataclass
class _Offer:
    number: int
    device_pages: Sequence[int]
    """Of the whole path."""
    ready: Sequence[Any]
    """Events of PyTorch: from then on the pages hold what they should."""
    kept: bool | None = None
    """How it ended; None: it has not."""


class Checkpoints:
    """``save(number, digests)`` asks the store, whose answer is ``granted``; ``saved(number, complete)`` tells it of the end."""

    def __init__(self, layout: PageLayout, stream: Stream, saved: Callable[[int, bool], None]) -> None:
        self._layout, self._stream, self._saved = layout, stream, saved
        self._offers: deque[_Offer] = deque()
        self._waiting: dict[int, _Offer] = {}
        self._numbered = 0
        self._changed = threading.Condition()
        self._work: queue.SimpleQueue[tuple[_Offer, array[int], array[int], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="talaria-checkpoints", daemon=True)
        self._thread.start()

    def offer(self, device_pages: Sequence[int], ready: Sequence[Any], save: Callable[[int], None]) -> None:
        """A path on the device that ``ready`` completes; the device pages stay until ``pop``. ``save`` asks for room under a number."""
        self._numbered += 1
        offer = _Offer(self._numbered, device_pages, ready)
        self._offers.append(offer)
        self._waiting[offer.number] = offer
        save(offer.number)

    def refuse(self) -> None:
        """Something that cannot be saved takes its turn."""
        self._offers.append(_Offer(0, (), (), kept=False))

    def granted(self, number: int, pages: array[int], slabs: array[int], kept: bool) -> None:
        """The store's answer to an offer; on any thread."""
        self._work.put((self._waiting.pop(number), pages, slabs, kept))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            offer, pages, slabs, kept = work
            complete = self._copy(offer, pages, slabs) if pages else True
            if pages:
                self._saved(offer.number, complete)
            with self._changed:
                offer.kept = kept and complete
                self._changed.notify_all()

    def _copy(self, offer: _Offer, pages: array[int], slabs: array[int]) -> bool:
        try:
            copies = self._layout.to_pool([offer.device_pages[page] for page in pages], slabs)
            self._stream.copy(copies, offer.ready).wait()
        except Exception:  # whatever it is, it is this offer's: those behind it, and SGLang's locks on their pages, must not wait for ever
            _log.exception("talaria: KV is not kept on the host")
            return False
        return True

    def completed(self) -> int:
        """How many offers have ended, up to the first that has not."""
        return next((index for index, offer in enumerate(self._offers) if offer.kept is None), len(self._offers))

    def pop(self) -> bool:
        """Whether the oldest one, which has ended, is kept on the host."""
        return bool(self._offers.popleft().kept)

    def drain(self, until_s: float) -> None:
        """Wait for all of them, and forget them. Raises TimeoutError at ``until_s`` (``time.monotonic()``)."""
        with self._changed:
            if not self._changed.wait_for(self._idle, until_s - time.monotonic()):
                left = len(self._offers) - self.completed()
                raise TimeoutError(f"{left} copies of KV to the host have not ended, or the instance agent does not answer")
        self._offers.clear()

    def _idle(self) -> bool:
        return all(offer.kept is not None for offer in self._offers)

    def close(self) -> None:
        """Once it is drained."""
        self._work.put(None)
        self._thread.join()
        self._stream.close()
