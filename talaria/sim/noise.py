"""Seeded variation of ground-truth durations: lognormal factors of mean one, drawn in blocks from named streams."""

from __future__ import annotations

import math

import numpy as np

_BLOCK = 256


class Factors:
    """An endless supply of factors with coefficient of variation ``cv``; constant one if it is zero.

    With ``ranks`` each factor is the largest of so many: a collective step waits for its slowest rank.
    """

    def __init__(self, rng: np.random.Generator, cv: float, ranks: int = 1) -> None:
        self._rng = rng
        self._sigma = math.sqrt(math.log1p(cv * cv))
        self._ranks = ranks
        self._block: list[float] = []

    def __call__(self) -> float:
        if self._sigma == 0.0:
            return 1.0
        if not self._block:
            normal = self._rng.standard_normal((_BLOCK, self._ranks)).max(axis=1)
            self._block = np.exp(self._sigma * normal - 0.5 * self._sigma**2).tolist()
        return self._block.pop()
