"""Lets an SGLang server on the CPU honour sampling seeds, which it does with deterministic inference only: on GPUs.

The hash operator of its seeded sampler, which CPU builds lack, becomes one of our own: any will do that mixes seed, position and token.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_MASK = 0xFFFFFFFF


def _mix(value: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 16)


def _hash(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    rows = _mix(_mix(seed.to(torch.int64) & _MASK) ^ (positions.to(torch.int64) & _MASK))
    return _mix(rows.view(-1, 1) ^ _mix(col_indices.to(torch.int64).view(1, -1))).to(torch.uint32)


def _seeded(info: Any, _class: type, batch: Any, *_arguments: Any, **_named: Any) -> None:
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if any(seed is not None for seed in seeds):
        info.sampling_seed = torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64)


def load() -> None:
    HookRegistry.register("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", _hash, HookType.REPLACE)
    HookRegistry.register("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _seeded, HookType.AFTER)
