"""Arithmetic of the one managed buffer per GPU: weights low, KV above, graph pool and runtime high (SPEC §5.1).

Base addresses decide whether captured CUDA graphs can be reused; footprints decide whether a model fits at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class LayoutError(ValueError):
    """A model does not fit the managed buffer, or the device."""


class ByteRange(NamedTuple):
    """[first, end) in bytes from the buffer's low end."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model needs on one GPU, in bytes. ``kv_page_bytes`` is one page over all layers.

    ``residue_bytes`` is what stays outside the buffer while the model is parked (contexts, handles, graphs).
    """

    name: str
    weight_bytes: int
    kv_page_bytes: int
    runtime_bytes: int = 0
    graph_pool_bytes: int = 0
    residue_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Regions:
    """Where the active model's regions lie."""

    weights: ByteRange
    kv: ByteRange
    graph_pool: ByteRange
    runtime: ByteRange
    kv_pages: int

    def reuses_graphs_of(self, captured: Regions) -> bool:
        """Whether graphs captured under ``captured`` are valid here: all four base addresses are unchanged."""
        return (self.weights.first, self.kv.first, self.graph_pool.first, self.runtime.first) == (
            captured.weights.first, captured.kv.first, captured.graph_pool.first, captured.runtime.first,
        )  # fmt: skip


class BumpLayout:
    """``managed_bytes`` of a device on which no more than ``device_cap_bytes`` may be in use at any time."""

    def __init__(self, managed_bytes: int, device_cap_bytes: int, *, align_bytes: int = 1) -> None:
        if not 0 < managed_bytes <= device_cap_bytes or align_bytes < 1:
            raise LayoutError(
                f"managed_bytes={managed_bytes}, device_cap_bytes={device_cap_bytes}, align_bytes={align_bytes}: "
                "allowed 1 or more, at least managed_bytes, 1 or more"
            )
        self.managed_bytes = managed_bytes
        self.device_cap_bytes = device_cap_bytes
        self.align_bytes = align_bytes

    def regions(self, model: ModelMemory) -> Regions:
        """The regions of ``model`` while it is active. Raises LayoutError if not even one KV page is left."""
        runtime = self._down(self.managed_bytes - model.runtime_bytes)
        graph_pool = self._down(runtime - model.graph_pool_bytes)
        kv = -(-model.weight_bytes // self.align_bytes) * self.align_bytes
        kv_pages = (graph_pool - kv) // model.kv_page_bytes
        if kv_pages < 1:
            raise LayoutError(
                f"{model.name} needs {kv + model.kv_page_bytes + self.managed_bytes - graph_pool} bytes with one KV page, "
                f"the managed buffer has {self.managed_bytes}"
            )
        return Regions(
            ByteRange(0, model.weight_bytes),
            ByteRange(kv, kv + kv_pages * model.kv_page_bytes),
            ByteRange(graph_pool, graph_pool + model.graph_pool_bytes),
            ByteRange(runtime, runtime + model.runtime_bytes),
            kv_pages,
        )

    def peak_bytes(self, parked: Iterable[ModelMemory]) -> int:
        """Footprint of the device while any model is active: the whole buffer and the residue of ``parked`` models.

        Raises LayoutError above the device cap.
        """
        peak = self.managed_bytes + sum(model.residue_bytes for model in parked)
        if peak > self.device_cap_bytes:
            raise LayoutError(f"{peak} bytes with the residue of parked models, the device cap is {self.device_cap_bytes}")
        return peak

    def _down(self, address: int) -> int:
        return address // self.align_bytes * self.align_bytes
