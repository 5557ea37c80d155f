"""Randomness by name: every purpose draws from its own generator, so that using one more number in one place changes
nothing anywhere else, and two configurations under one seed see the same workload (common random numbers)."""

from __future__ import annotations

from zlib import crc32

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator of the stream ``name`` under ``seed`` (>= 0): the same in every process, unaffected by any other."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, crc32(name.encode())))))
