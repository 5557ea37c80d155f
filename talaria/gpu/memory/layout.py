"""Where the bytes of a page are: on the device, a piece in each layer's buffers; in the pool, one piece after another in its slabs.

It knows addresses and sizes only, so it is the same for paired K and V buffers, latent buffers and recurrent states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from talaria.gpu.memory.mover import Addresses, Copies


class Buffer(NamedTuple):
    """One layer's buffer: page *n* is the ``page_bytes`` from ``address`` + *n* × ``page_bytes`` on."""

    layer: int
    """From 0."""
    address: int
    page_bytes: int


class PageLayout:
    """Of one rank's engine: ``buffers`` in the order of their layers, over slabs of ``slab_bytes`` from ``pool_address`` on."""

    def __init__(self, buffers: Sequence[Buffer], slab_bytes: int, pool_address: int = 0) -> None:
        self.page_bytes = sum(buffer.page_bytes for buffer in buffers)
        self.page_slabs = -(-self.page_bytes // slab_bytes)
        self.layers = 1 + max(buffer.layer for buffer in buffers)
        self._slab_bytes = slab_bytes
        self._pool_address = pool_address
        cuts: list[tuple[int, int, int, int, int, int]] = []
        at = 0
        for layer, address, page_bytes in buffers:
            within = 0
            while within < page_bytes:  # a piece may run on into the next slab
                slab, offset = divmod(at, slab_bytes)
                size = min(page_bytes - within, slab_bytes - offset)
                cuts.append((layer, address + within, page_bytes, slab, offset, size))
                within, at = within + size, at + size
        table = np.array(cuts, dtype=np.int64)
        self._layer, self._address, self._stride, self._slab, self._offset, self._size = table.T

    def to_pool(self, pages: Sequence[int], slabs: Sequence[int]) -> Copies:
        """Device to pool, all layers of a page together. ``slabs`` are those of all pages, one page after another."""
        device, pool = self._places(pages, slabs, slice(None))
        return Copies(pool, device, self._sizes(len(pages), slice(None)))

    def to_device(self, pages: Sequence[int], slabs: Sequence[int], layer: int) -> Copies:
        """Pool to device, one layer."""
        cuts = slice(*np.searchsorted(self._layer, (layer, layer + 1)).tolist())
        device, pool = self._places(pages, slabs, cuts)
        return Copies(device, pool, self._sizes(len(pages), cuts))

    def _places(self, pages: Sequence[int], slabs: Sequence[int], cuts: slice) -> tuple[Addresses, Addresses]:
        numbers = np.asarray(pages, dtype=np.int64)[:, None]
        device = self._address[cuts] + numbers * self._stride[cuts]
        table = np.asarray(slabs, dtype=np.int64).reshape(len(pages), self.page_slabs)
        pool = self._pool_address + table[:, self._slab[cuts]] * self._slab_bytes + self._offset[cuts]
        return device.ravel(), pool.ravel()

    def _sizes(self, pages: int, cuts: slice) -> Addresses:
        return np.tile(self._size[cuts], pages)
