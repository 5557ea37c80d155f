"""SGLang's KV pools with their buffers in the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from talaria.gpu import compat
from talaria.gpu.hooks import arena, placing


def in_arena(kind: str) -> type | None:
    """None for a kind whose place in the arena is not known; with such a pool ``arena.attached`` has no KV."""
    return {"mha": ArenaMha, "mla": ArenaMla}.get(kind)


def _fragments(pool: Any, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """One for each shape, all of the same size. Raises SystemExit with one line where they are not, or do not fit."""
    attached = arena.attached
    assert attached is not None, "SGLang loads the model before it makes its KV pool"
    sizes = {shape: torch.Size(shape).numel() * pool.store_dtype.itemsize for shape in shapes}
    pages = (pool.size + pool.page_size) // pool.page_size
    try:
        if len(set(sizes.values())) != 1 or (pool.size + pool.page_size) % pool.page_size:
            raise ValueError(f"KV buffers of {sorted(sizes.values())} bytes for pages of {pool.page_size} tokens")
        nbytes = sizes[shapes[0]]
        addresses = attached.carve(len(shapes), nbytes, nbytes // pages)
    except ValueError as error:
        raise SystemExit(f"talaria: the KV pool cannot lie in the arena: {error}") from error
    return [
        placing.tensor_at(address, shape, pool.store_dtype, attached.device) for address, shape in zip(addresses, shapes, strict=True)
    ]


def _watch(buffers: Callable[[], list[torch.Tensor]]) -> None:
    assert arena.attached is not None
    arena.attached.kv_buffers = buffers


class ArenaMha(compat.kv_pool_class("mha")):  # type: ignore[misc]
    def _create_buffers_normal(self) -> None:
        keys, values = self._kv_buffer_shapes()
        fragments = _fragments(self, [keys, values] * self.layer_num)
        self.k_buffer, self.v_buffer = fragments[::2], fragments[1::2]
        _watch(lambda: [rows for both in zip(self.k_buffer, self.v_buffer, strict=True) for rows in both])


class ArenaMla(compat.kv_pool_class("mla")):  # type: ignore[misc]
    def _create_buffers(self) -> None:
        self.kv_buffer = _fragments(self, [(self.size + self.page_size, 1, self.kv_cache_dim)] * self.layer_num)
        _watch(lambda: list(self.kv_buffer))
