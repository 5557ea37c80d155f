"""One rank's KV pages while its model serves, and the next model's weights that a thread stages in the free ones (SPEC §5.3).

The books are ``substrate``'s: pages are taken from the low end, so that the high end stays clean. An allocation goes around the chunk that
is being written; where there is no other room the chunk is given up. Which pages it takes may thus differ from rank to rank, how many are
free does not: engines decide by that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from talaria.gpu.memory.gather import NOTHING, Image, Ledger
from talaria.gpu.memory.mover import CopyFailed, Event
from talaria.gpu.memory.stager import Stager
from talaria.substrate.pages import Extent, PagePool

TELL_S: Final = 0.2
_log = logging.getLogger(__name__)


class Figures(NamedTuple):
    """What is staged, in bytes of this rank."""

    target: str = ""
    """Empty: nothing is to be staged."""
    weight_bytes: int = 0
    clean_bytes: int = 0
    dirty_bytes: int = 0
    slack_bytes: int = 0
    copied_bytes: int = 0
    """Since the target was named, with what was copied again."""
    copying_s: float = 0.0
    """How long that took, waits for the rate included and waits for room left out."""


class Tail:
    """``total`` pages. The scheduler's thread allocates and frees; everything else may come from any thread."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = PagePool(total)
        self._clock = clock
        self._written: Callable[[], Sequence[Any]] = tuple
        self._tell: Callable[[Figures], None] = lambda figures: None
        self._told = Figures()
        self._tell_s = 0.0
        """Not before then again."""
        self._changed = threading.Condition()
        self._stager: Stager | None = None
        self._bytes_per_s = 0.0
        self._due_s = 0.0
        """The next chunk may begin from then on."""
        self._copied_bytes, self._copying_s = 0, 0.0
        self._since_s: float | None = None
        """Start of what is not in ``_copying_s`` yet; None while nothing can be copied."""
        self._starved = False
        """No missing chunk has room, until the high water falls."""
        self._thread: threading.Thread | None = None
        self._closed = False

    # --- the engine's pages ------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    def free_extents(self) -> list[Extent]:
        with self._changed:
            return self._pool.free_extents()

    def alloc(self, pages: int) -> list[Extent]:
        """The lowest free pages, but for those of the chunk that is being written. Raises OutOfPages, with nothing changed."""
        with self._changed:
            stager, pool = self._stager, self._pool
            if stager is None:
                return pool.alloc(pages)
            below = pool.stays_below(stager.map.reach_page, pages)
            taken = pool.alloc(pages) if below else self._alloc_in_tail(stager, pages)
            stager.map.dirty(taken)
            return taken

    def _alloc_in_tail(self, stager: Stager, pages: int) -> list[Extent]:
        pool, writing = self._pool, stager.map.in_flight_pages
        if writing is None:
            return pool.alloc(pages)
        first, count = writing[0], max(0, min(sum(writing), pool.total) - writing[0])  # a block may be longer than its pages
        if pages > pool.free_pages - count:
            if pages <= pool.free_pages:
                stager.cancel_in_flight()
            return pool.alloc(pages)
        pool.block(first, count)
        try:
            return pool.alloc(pages)
        finally:
            pool.unblock(first, count)

    def free(self, extents: Iterable[Extent]) -> None:
        """Raises ValueError for a page that is not in use."""
        with self._changed:
            before = self._pool.high_water if self._starved else 0
            self._pool.free(extents)
            if self._pool.high_water < before:
                self._wake()

    def free_all(self, total: int, kept: int = 0) -> None:
        """Every page is free but the first ``kept``, which were in use, and there are ``total`` from now on.

        In one step: what is free for a moment is staged into.
        """
        with self._changed:
            if total == self._pool.total:
                self._pool.free_all()
            else:
                assert self._stager is None, "the pages of a region that is staged into are as many as they were"
                self._pool = PagePool(total)
            self._pool.alloc(kept)
            self._wake()

    # --- what is staged there ----------------------------------------------------------------------------------------

    def open(
        self, stager: Stager, written: Callable[[], Sequence[Any]] = tuple, tell: Callable[[Figures], None] = lambda figures: None
    ) -> None:
        """The model is active: ``stager`` may write to free pages until ``park``.

        ``written()`` gives events of PyTorch behind all that the device may still do with pages that are free by now. ``tell`` hears now
        and then how far it is, on a thread of its own.
        """
        with self._changed:
            assert not self._closed and self._stager is None
            self._stager, self._written, self._tell, self._told = stager, written, tell, Figures()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="talaria-staging", daemon=True)
                self._thread.start()

    def stage(self, model: str, image: Image, bytes_per_s: float) -> None:
        """Stage ``model`` from now on, in place of another; what is staged of it already stays. Without an active model nothing happens."""
        with self._changed:
            if (stager := self._stager) is None:
                return
            if stager.map.target != model:
                stager.cancel_in_flight()
                stager.begin(model, image, self._pool.high_water)
                self._copied_bytes, self._copying_s, self._since_s = 0, 0.0, None
            self._bytes_per_s, self._due_s = bytes_per_s, self._clock()
            self._told = Figures()  # whoever asks for it wants to hear how far it is
            self._wake()

    def unstage(self) -> None:
        """Give up what is staged."""
        with self._changed:
            if self._stager is not None:
                self._stager.cancel_in_flight()
                self._stager.map.cancel()
                self._wake()

    def park(self) -> Ledger:
        """The model is not active any more, and nothing is written to its pages. What is staged in them."""
        with self._changed:
            stager, self._stager = self._stager, None
            if stager is None:
                return NOTHING
            stager.settle()
            return NOTHING if stager.map.target is None else stager.ledger()

    def figures(self) -> Figures:
        with self._changed:
            if self._stager is None or (target := self._stager.map.target) is None:
                return Figures()
            staging = self._stager.map
            if staging.tail_first_page != self._pool.high_water:
                staging.move_tail(self._pool.high_water)
            return Figures(
                target, staging.weight_bytes, staging.clean_bytes, staging.dirty_bytes, staging.slack_bytes, self._copied_bytes,
                self._copying_s,
            )  # fmt: skip

    def close(self) -> None:
        """End the thread."""
        self.park()
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._starved = False
        self._changed.notify()

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                begun = None if self._closed else self._step()
                if begun is None and not self._closed:
                    self._changed.wait(self._idle_s())
            if begun is not None:
                self._finish(*begun)
            self._report()

    def _step(self) -> tuple[Stager, Event] | None:
        """Begin to copy one more chunk, if one is wanted, due and has room."""
        stager, now_s = self._stager, self._clock()
        if stager is None or stager.map.target is None or self._starved or now_s < self._due_s:
            return None
        try:
            event = stager.step(self._pool.high_water, self._written())
        except CopyFailed as error:
            self._give_up(stager, error)
            return None
        if event is None:
            self._starved, self._since_s = True, None
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        takes_s = stager.copying_bytes / self._bytes_per_s
        self._due_s = max(self._due_s, now_s - takes_s) + takes_s
        return stager, event

    def _idle_s(self) -> float | None:
        """How long there is nothing to do; None: until somebody wakes the thread."""
        if self._stager is None or (self._stager.map.target is None and not self._told.target):
            return None
        if self._stager.map.target is None:
            return max(0.0, self._tell_s - self._clock())
        return TELL_S if self._starved else min(TELL_S, max(0.0, self._due_s - self._clock()))

    def _finish(self, stager: Stager, event: Event) -> None:
        """Wait for a copy, beside the scheduler, which may allocate meanwhile."""
        with contextlib.suppress(CopyFailed):
            event.wait()
        with self._changed:
            self._copied_bytes += stager.copying_bytes
            if self._since_s is not None:
                now_s = self._clock()
                self._copying_s += now_s - self._since_s
                self._since_s = now_s
            if not stager.settle():
                self._give_up(stager, "a copy failed")

    def _give_up(self, stager: Stager, why: object) -> None:
        _log.error("talaria: staging of %s is given up: %s", stager.map.target, why)
        stager.map.cancel()

    def _report(self) -> None:
        now_s = self._clock()
        if now_s < self._tell_s or (figures := self.figures()) == self._told:
            return
        self._tell_s, self._told = now_s + TELL_S, figures
        self._tell(figures)
