"""Tensors at addresses of our choice: the same on CPUs and on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

ALIGN_BYTES: Final = 512
"""Of storages; what PyTorch's own allocators give."""


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Over memory that is not its own; nothing is read or written, so nothing need be mapped there yet."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(shape))


def addresses(model: Any) -> dict[str, int]:
    """Of all parameters and buffers, by name."""
    return {name: tensor.data_ptr() for name, tensor in _tensors(model)}


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _plain(model: Any) -> list[torch.Tensor]:
    """What modules hold beside those, like weights that were made of others after the load: a switch takes it away, too."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]


def move(model: Any, address: int, room_bytes: int, device: torch.device) -> int:
    """Copy the storages of all tensors that modules hold, one behind the other, from ``address`` on, and make them views of the copies.

    Returns the bytes that they take with padding. Raises ValueError where they do not fit.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in [*(tensor for _, tensor in _tensors(model)), *_plain(model)]:
        if tensor.device.type == device.type and tensor.untyped_storage().nbytes():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    needed = sum(_padded(tensors[0].untyped_storage().nbytes()) for tensors in by_storage.values())
    if needed > room_bytes:
        what, there = f"weights of {needed / 2**20:.1f} MiB", f"an arena of {room_bytes / 2**20:.1f} MiB"
        raise ValueError(f"{what} do not fit into {there}: more managed_gib")
    at = 0
    for tensors in by_storage.values():
        nbytes = tensors[0].untyped_storage().nbytes()
        copied = tensor_at(address + at, (nbytes,), torch.uint8, device).untyped_storage()
        copied.copy_(tensors[0].untyped_storage(), non_blocking=False)
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = view.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())
        at += _padded(nbytes)
    return at


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was told to do."""
    torch.get_device_module(device).synchronize()
