"""The CPU build of SGLang's kernel package, as far as plain PyTorch replaces it.

It registers one operator, so SGLang takes each layer's PyTorch path. What has no such path is written here; every other name can be
imported and says so when it is called.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.0.0"
_WORD = 0xFFFFFFFF


def _times(a: torch.Tensor, b: int) -> torch.Tensor:
    """Product modulo 2^32 in signed 64-bit integers, which 32 by 32 bits would overflow: high and low half of ``a`` apart."""
    return ((a & 0xFFFF) * b + ((((a >> 16) * b) & 0xFFFF) << 16)) & _WORD


def _rotated(a: torch.Tensor, bits: int) -> torch.Tensor:
    return ((a << bits) | (a >> (32 - bits))) & _WORD


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit, hash seed 0) of (seed low, seed high, position, column) as four words, for each row and column: the noise
    of seeded sampling, a function of the request's seed and the token's position alone."""
    wide = seeds.view(torch.int64)
    words = [wide & _WORD, (wide >> 32) & _WORD, positions.to(torch.int64) & _WORD]
    hashed = torch.zeros((), dtype=torch.int64)
    for word in [*(word.unsqueeze(1) for word in words), columns.to(torch.int64).unsqueeze(0)]:
        hashed = hashed ^ _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
        hashed = (_times(_rotated(hashed, 13), 5) + 0xE6546B64) & _WORD
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = _times(hashed ^ (hashed >> shift), factor)
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


_operators = torch.library.Library("sgl_kernel", "DEF")
_operators.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
_operators.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, locations: Any, width: int) -> None:
    """Write ``locations`` (KV slots, one request after another) into columns ``starts[i]:ends[i]`` of row ``rows[i]`` of ``table``."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on the CPU")

    absent.__name__ = name
    return absent
