"""Which submissions a snapshot accounts for: the last number up to which all are known (SPEC §3.5)."""

from __future__ import annotations


class SeenSubmissions:
    """Numbers come from 1 and out of order; one that will never come is void, which counts as seen."""

    def __init__(self) -> None:
        self.last = 0
        self._ahead: set[int] = set()

    def add(self, seq: int) -> None:
        if seq <= self.last:
            return
        self._ahead.add(seq)
        while self.last + 1 in self._ahead:
            self.last += 1
            self._ahead.remove(self.last)
