"""What the host registry keeps: the blocks of one prefix node, the copies that fill them, the holds that keep them.

A block is one page of KV on the host. It is void, pending (its copy runs) or committed: by all ranks, and for the same
content, since the prefix is what it is known by. Only committed ones can be restored (SPEC §5.2).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from talaria.substrate.extents import ExtentSet
from talaria.substrate.radix import Entry, Step


class Ticket(NamedTuple):
    """One asynchronous D2H copy. ``parts`` are the pages that it moves, as (node, first page, count)."""

    id: int
    model: str
    family: str
    bytes: int
    parts: tuple[tuple[int, int, int], ...]
    path: tuple[Step, ...]
    """The whole path under the copy: held until it has ended."""


class Hold(NamedTuple):
    """A DMA pin or a radix reference on a path."""

    id: int
    path: tuple[Step, ...]


class HostEntry(Entry):
    """The blocks of one node of one model. Its key is (model, node)."""

    __slots__ = ("committed", "copied", "incomplete", "node")

    def __init__(self, key: Hashable, first_page: int, page_bytes: int, parent: Entry | None) -> None:
        super().__init__(key, first_page, page_bytes, parent)
        assert isinstance(key, tuple) and isinstance(key[1], int)
        self.node = key[1]
        self.committed = ExtentSet()
        self.copied = ExtentSet()
        """Pages that are committed or pending; the others of the entry are void."""
        self.incomplete: set[int] = set()
        """End pages of checkpoint positions whose recurrent state some rank could not save."""

    def forget_cut(self, pages: int) -> None:
        """The tree has cut ``pages`` from the tail: nothing is known of them any more."""
        end = self.end_page
        self.committed.take_range(end, end + pages)
        self.copied.take_range(end, end + pages)
        self.incomplete = {page for page in self.incomplete if page <= end}
