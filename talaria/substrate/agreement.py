"""What all TP ranks agree they hold of one prefix: the basis of what a host registry may expose (SPEC §5.2)."""

from __future__ import annotations


class RankAgreement:
    """Committed lengths and cumulative hashes of one node's path, as its ranks report them at page boundaries."""

    __slots__ = ("_known", "agreed_page", "first_page")

    def __init__(self, ranks: int, first_page: int) -> None:
        self.first_page = first_page
        self.agreed_page = first_page
        """The longest boundary that every rank has reported alike."""
        self._known: list[dict[int, bytes]] = [{} for _ in range(ranks)]
        """Of each rank: end page → cumulative hash, up to its committed length."""

    def report(self, rank: int, page: int, digest: bytes) -> None:
        """``rank`` has committed up to ``page``; a shorter length than before takes back what lies beyond."""
        known = self._known[rank] = {end: old for end, old in self._known[rank].items() if end < page}
        known[page] = digest
        self._settle()

    def cut(self, end_page: int) -> None:
        """The pages from ``end_page`` on are gone, on every rank."""
        self._known = [{end: digest for end, digest in known.items() if end <= end_page} for known in self._known]
        self._settle()

    def _settle(self) -> None:
        first, *others = self._known
        alike = (end for end, digest in first.items() if all(other.get(end) == digest for other in others))
        self.agreed_page = max(alike, default=self.first_page)
