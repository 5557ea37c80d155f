"""Runtime buffers at the high end of the window (SPEC §5.1): the table of each request's pages, workspaces of attention backends.

SGLang makes them with plain PyTorch, together with its pools and backends. What is made on the device ``within`` that takes its place in
the window instead. Some of it is written once and for all, so that its bytes are kept on the host while the model is parked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from talaria.gpu.hooks import placing
from talaria.gpu.memory import gather
from talaria.gpu.memory.cpu import MemoryFile
from talaria.gpu.memory.mover import Mover, Stream

_MAKERS: Final[frozenset[Callable[..., Any]]] = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.arange))
_PLAIN: Final = frozenset(("size", "fill_value", "start", "end", "step", "dtype", "device"))
"""Arguments of a tensor that needs nothing but memory on a device."""


class Runtime:
    """What lies between ``low`` and the end of one window. Nothing in it is given back: it is made once, at the start of an engine."""

    def __init__(self, mover: Mover, end: int, device: torch.device) -> None:
        self.low = end
        self.device = device
        self._end = end
        self._mover = mover
        self._kept = 0
        """Where its bytes are while the model is parked; set by ``keep``."""

    @property
    def nbytes(self) -> int:
        return self._end - self.low

    def within(self, floor: int) -> AbstractContextManager[Any]:
        """While entered, what this thread makes on the device lies here, down to the address ``floor``.

        Raises SystemExit with one line where something does not fit.
        """
        mode: AbstractContextManager[Any] = _HighEnd(self, floor)
        return mode

    def take(self, nbytes: int, floor: int) -> int:
        """The address of new room. Raises SystemExit."""
        low = (self.low - nbytes) // placing.ALIGN_BYTES * placing.ALIGN_BYTES
        if low < floor:
            needed, there = (self._end - low) / 2**20, (self._end - floor) / 2**20
            text = f"runtime buffers of {needed:.1f} MiB do not fit into {there:.1f} MiB that weights and KV leave of the arena"
            raise SystemExit(f"talaria: {text}: fewer kv_tokens, or more managed_gib")
        assert not self._kept, "what keeps runtime buffers has no room for one that is made later"
        self.low = low
        return low

    def keep(self) -> None:
        """All are made; from here on there is memory for them on the host. Raises OSError, CopyFailed."""
        if self.nbytes:
            memory = MemoryFile.make("talaria-runtime", self.nbytes)
            self._kept = memory.map(0, self.nbytes)
            memory.close()
            self._mover.pin(self._kept, self.nbytes)

    def park(self, stream: Stream) -> None:
        """Bring the bytes to the host. Raises CopyFailed."""
        if self._kept:
            stream.copy(gather.copies([(self._kept, self.low, self.nbytes)])).wait()

    def resume(self, stream: Stream) -> None:
        """Bring them back. Raises CopyFailed."""
        if self._kept:
            stream.copy(gather.copies([(self.low, self._kept, self.nbytes)])).wait()


class _HighEnd(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, runtime: Runtime, floor: int) -> None:
        super().__init__()
        self._runtime = runtime
        self._floor = floor

    def __torch_function__(self, maker: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None) -> Any:
        named, device = named or {}, self._runtime.device
        if maker not in _MAKERS or not named.keys() <= _PLAIN or torch.device(named.get("device") or "meta").type != device.type:
            return maker(*arguments, **named)
        shape = maker(*arguments, **{**named, "device": "meta"})
        address = self._runtime.take(shape.untyped_storage().nbytes(), self._floor)
        made = placing.tensor_at(address, shape.shape, shape.dtype, device)
        return made if maker is torch.empty else maker(*arguments, **{**named, "dtype": shape.dtype}, out=made)
