"""Seeded variation of ground-truth durations: lognormal factors of mean one, drawn in blocks from named streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, repeat

import numpy as np

_BLOCK = 256

Factors = Callable[[], float]
"""An endless supply of factors."""


def factors(rng: np.random.Generator, cv: float, ranks: int = 1, *, median_one: bool = False) -> Factors:
    """Factors with coefficient of variation ``cv`` and mean one, or median one; constant one if ``cv`` is zero.

    With ``ranks`` each factor is the largest of so many: a collective step waits for its slowest rank.
    """
    if cv == 0.0:
        return repeat(1.0).__next__
    sigma = math.sqrt(math.log1p(cv * cv))
    return chain.from_iterable(_blocks(rng, sigma, 0.0 if median_one else -0.5 * sigma**2, ranks)).__next__


def _blocks(rng: np.random.Generator, sigma: float, shift: float, ranks: int) -> Iterator[list[float]]:
    while True:
        normal = rng.standard_normal((_BLOCK, ranks)).max(axis=1)
        yield np.exp(sigma * normal + shift).tolist()[::-1]  # any order would do; another one would change every seed's run
