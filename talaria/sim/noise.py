"""Seeded variation of ground-truth durations: lognormal factors of mean one, drawn in blocks from named streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import numpy as np

_BLOCK = 256

Factors = Callable[[], float]
"""An endless supply of factors."""


def factors(rng: np.random.Generator, cv: float, ranks: int = 1) -> Factors:
    """Factors with coefficient of variation ``cv``; constant one if it is zero.

    With ``ranks`` each factor is the largest of so many: a collective step waits for its slowest rank.
    """
    return repeat(1.0).__next__ if cv == 0.0 else chain.from_iterable(_blocks(rng, cv, ranks)).__next__


def _blocks(rng: np.random.Generator, cv: float, ranks: int) -> Iterator[list[float]]:
    sigma = math.sqrt(math.log1p(cv * cv))
    while True:
        normal = rng.standard_normal((_BLOCK, ranks)).max(axis=1)
        yield np.exp(sigma * normal - 0.5 * sigma**2).tolist()[::-1]  # any order would do; another one would change every seed's run
