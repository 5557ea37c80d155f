"""SGLang's paged allocator over ``memory.tail``: the lowest free pages first, and what it takes is known to staging (SPEC §5.3).

SGLang's own free list lies on the device and gives what was freed last. Here the books are on the host: page numbers of an allocation go
to the device, where SGLang's kernels cut them as ever, and those that are freed come back by a copy for which nobody waits, unless pages
run short. They count as free meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from talaria.gpu import compat
from talaria.gpu.memory.tail import Tail
from talaria.substrate.pages import Extent, OutOfPages

_PADDING_PAGES: Final = 1
"""The first ones, which are SGLang's own: padding is written there."""


class HostCopy:
    """Page numbers of the device on their way to the host."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids, self._event = ids, None
        if ids.is_cuda:
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def array(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Waits."""
        if self._event is not None:
            self._event.synchronize()
        return np.asarray(self._ids)


class LowPagesAllocator(compat.paged_allocator()):  # type: ignore[misc]
    """In place of SGLang's, by ``SRTPlatform.get_paged_allocator_cls``."""

    free_pages: torch.Tensor
    tail: Tail | None = None
    """Set by the first ``clear``, in SGLang's constructor."""
    wipe: Callable[[list[Extent]], None] | None = None
    """Makes these pages as good as new; where something else was written there meanwhile."""

    def clear(self) -> None:
        super().clear()
        self.free_pages = self.free_pages[:0]  # SGLang's functions find here exactly what they need
        self._coming: deque[HostCopy] = deque()
        self._coming_pages = 0
        total = self.num_pages + _PADDING_PAGES
        if self.tail is None:
            self.tail = Tail(total)
        self.tail.free_all(total, _PADDING_PAGES)

    def available_size(self) -> int:
        assert self.tail is not None
        return (self.tail.free_pages + self._coming_pages) * int(self.page_size)

    def get_all_free_pages(self) -> Any:
        """Only asked for by SGLang's checks of an idle engine."""
        assert self.tail is not None
        self._take_back(wait=True)
        return self._on_device(self.tail.free_extents())

    def alloc(self, need_size: int) -> Any:
        return super().alloc(need_size) if self._fetch(need_size // self.page_size) else None

    def alloc_extend(
        self, prefix_lens: Any, prefix_lens_cpu: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any, extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:  # fmt: skip
        if num_new_pages is None:
            num_new_pages = compat.new_pages(self.page_size, seq_lens_cpu, prefix_lens_cpu)
        if not self._fetch(num_new_pages):
            return None
        return super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=num_new_pages
        )

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        if not self._fetch(compat.new_pages(self.page_size, seq_lens_cpu)):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _fetch(self, pages: int) -> bool:
        """Take so many pages out of the books, for SGLang to hand out. False, and nothing has changed, where there are not so many."""
        assert self.tail is not None and not len(self.free_pages)
        self._take_back(wait=self.tail.free_pages < pages)
        try:
            taken = self.tail.alloc(pages) if pages else []
        except OutOfPages:
            return False
        if self.wipe is not None:
            self.wipe(taken)
        self.free_pages = self._on_device(taken)
        return True

    def _on_device(self, pages: list[Extent]) -> torch.Tensor:
        numbers = np.concatenate([np.arange(first, first + count) for first, count in pages] or [np.empty(0, np.int64)])
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)

    def _release_page_ids(self, *page_ids: Any) -> None:
        """Where all of SGLang's ways to free end."""
        for ids in page_ids:
            if len(ids):
                self._coming.append(HostCopy(ids))
                self._coming_pages += len(ids)
        self._take_back(wait=False)

    def _take_back(self, *, wait: bool) -> None:
        assert self.tail is not None
        while self._coming and (wait or self._coming[0].done()):
            freed = np.sort(self._coming.popleft().array())
            self._coming_pages -= len(freed)
            self.tail.free(extents(freed))


def extents(pages: np.ndarray[Any, np.dtype[np.int64]]) -> list[Extent]:
    """Of ascending numbers."""
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    counts = np.diff(starts, append=len(pages))
    return list(zip(pages[starts].tolist(), counts.tolist(), strict=True))
