"""SGLang's platforms with the arena behind them: what ``plugin.platform`` names, and SGLang makes in every process of an engine.

That is in the middle of its own imports, so everything else is imported when it is needed.
"""

from __future__ import annotations

from typing import Any

from talaria.gpu import compat


class ArenaPlatform:
    """Beside one of SGLang's platforms."""

    def post_load_model(self, model: Any) -> None:
        from talaria.gpu.hooks import arena

        super().post_load_model(model)  # type: ignore[misc]
        arena.attach(model, next(model.parameters()).device)
        self.empty_cache()  # type: ignore[attr-defined]

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        from talaria.gpu.hooks import pools

        return pools.in_arena(kind)

    def get_paged_allocator_cls(self) -> type:
        from talaria.gpu.hooks.allocator import LowPagesAllocator

        return LowPagesAllocator


class CpuArenaPlatform(ArenaPlatform, compat.platform("cpu")):  # type: ignore[misc]
    pass


class CudaArenaPlatform(ArenaPlatform, compat.platform("cuda")):  # type: ignore[misc]
    pass
