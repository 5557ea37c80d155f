"""Which prompts and batches are measured: powers that cover what a model takes, few enough for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SHARE_OF_KV = 0.6
"""Of the KV pool that one measurement fills at most."""
NEW = (8, 64, 256, 1024, 4096, 16384)
CACHED = (0, 256, 1024, 4096, 16384, 65536)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 8192, 32768)
DECODE_TOKENS = 96
RESTORED = (256, 1024, 4096, 16384)
STAGING_TOKENS = (32, 128, 512, 2048, 8192)
"""Outputs beside which the next model is staged; longer ones only where it is not there by the end."""


class Prefill(NamedTuple):
    new: int
    cached: int


class Decode(NamedTuple):
    batch: int
    context: int


def prefill_points(most_tokens: int) -> list[Prefill]:
    """New tokens times cached ones; the smallest new ones are re-entry. ``most_tokens``: of a prompt."""
    return [Prefill(new, cached) for cached in CACHED for new in NEW if new + cached + 1 < most_tokens]


def restore_points(most_tokens: int) -> list[int]:
    """Tokens of a prefix that comes back from the host."""
    return [tokens for tokens in RESTORED if tokens + NEW[0] + 1 < most_tokens]


def decode_points(most_tokens: int, kv_tokens: int, max_running: int) -> list[Decode]:
    """Batch times context, as far as both fit the pool with what they generate."""
    return list(_decode(most_tokens, int(SHARE_OF_KV * kv_tokens), max_running))


def _decode(most_tokens: int, kv_tokens: int, max_running: int) -> Iterator[Decode]:
    for context in CONTEXTS:
        for batch in BATCHES:
            each = context + DECODE_TOKENS
            if each <= most_tokens and batch * each <= kv_tokens and batch <= max_running:
                yield Decode(batch, context)
