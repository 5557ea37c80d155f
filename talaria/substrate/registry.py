"""HKVR: the index of KV that the host holds for returns, over all models of one instance (SPEC §5.2).

Blocks are whole pages of prefix nodes, keyed by (model, node). A block is pending while its device-to-host copy runs and
is exposed only when every rank has committed it. Bytes count all ranks; slabs of every attention family share one budget.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from talaria.substrate.blocks import Hold as Hold
from talaria.substrate.blocks import HostEntry
from talaria.substrate.blocks import Ticket as Ticket
from talaria.substrate.prefix import PrefixForest, Spans
from talaria.substrate.radix import NO_USE_S, PageTree, Step, page_steps

FAMILIES = ("mha", "mla", "recurrent")
"""Paired K/V slabs; latent slabs; recurrent and auxiliary state, which can be resumed at checkpointed positions only."""


class HostRegistry:
    """``capacity_bytes`` of host slabs for an instance of ``ranks`` TP ranks.

    A model is ``mha`` unless ``register`` says otherwise. ``evictions`` counts reclaimed pages,
    ``restore_skips`` declined restores by family. With ``forest``, nodes that the registry holds stay known there.
    ``dropped(model, node, first_page, pages)`` hears of blocks whose room is free again, whatever the reason.
    """

    def __init__(
        self,
        capacity_bytes: int,
        ranks: int = 1,
        page_tokens: int = 64,
        *,
        forest: PrefixForest | None = None,
        dropped: Callable[[str, int, int, int], None] | None = None,
    ) -> None:
        if capacity_bytes < 0 or ranks < 1 or page_tokens < 1:
            raise ValueError(
                f"capacity_bytes={capacity_bytes}, ranks={ranks}, page_tokens={page_tokens}: allowed 0 or more, 1 or more, 1 or more"
            )
        self.capacity_bytes = capacity_bytes
        self.ranks = ranks
        self.page_tokens = page_tokens
        self.evictions = 0
        self.restore_skips = dict.fromkeys(FAMILIES, 0)
        self.protected: set[Hashable] = set()
        """Owners whose last checkpoint is spared as long as anything else can be evicted (live leases)."""
        self._forest = forest
        self._dropped = dropped
        self._tree: PageTree[HostEntry] = PageTree(HostEntry)
        self._families: dict[str, str] = {}
        self._spacing_pages: dict[str, int] = {}
        """Of the positions at which a recurrent model's state is saved."""
        self._open: dict[str, dict[int, Ticket]] = {}
        self._waiting: dict[int, int] = {}
        """Ticket → the ranks that have not committed it, as bits."""
        self._torn: set[int] = set()
        """Tickets with a rank whose recurrent state is incomplete."""
        self._pins: dict[int, Hold] = {}
        self._references: dict[int, Hold] = {}
        self._numbered = 0

    @property
    def used_bytes(self) -> int:
        """Slabs taken, pending copies included."""
        return self._tree.cost

    @property
    def held_bytes(self) -> int:
        """What cannot be reclaimed now: pinned, referenced or under a pending copy."""
        return self._tree.held_cost

    def register(self, model: str, family: str, checkpoint_tokens: int = 0) -> None:
        """Say what state ``model`` keeps, before its first checkpoint.

        A recurrent model saves its state every ``checkpoint_tokens``, a multiple of the page; its bytes per token include
        that state's share. Raises ValueError for an unknown family, spacing that does not suit it, or a second, other answer.
        """
        recurrent = family == "recurrent"
        if family not in FAMILIES or recurrent != (checkpoint_tokens > 0) or checkpoint_tokens % self.page_tokens:
            raise ValueError(
                f"family={family!r}, checkpoint_tokens={checkpoint_tokens} of {model}: allowed {', '.join(FAMILIES)}; "
                f"a multiple of {self.page_tokens} for recurrent, 0 for the others"
            )
        spacing_pages = max(1, checkpoint_tokens // self.page_tokens)
        if self._families.setdefault(model, family) != family or self._spacing_pages.setdefault(model, spacing_pages) != spacing_pages:
            raise ValueError(f"family={family!r}, checkpoint_tokens={checkpoint_tokens}: {model} is registered otherwise")

    # --- copies to the host ----------------------------------------------------------------------------------------

    def checkpoint(self, model: str, spans: Spans, bytes_per_token: int, now_s: float, *, owner: Hashable = None) -> Ticket | None:
        """Begin the D2H copy of the full pages of a path that are neither committed nor pending.

        None if there is nothing to copy, or no room even after eviction.
        """
        if model not in self._families:
            self.register(model, "mha")
        page_bytes = bytes_per_token * self.page_tokens
        steps, entries = self._steps(model, spans), self._tree.entries
        parts = []
        for key, start, end in steps:
            known = entries.get(key)
            for first, count in ((start, end - start),) if known is None else known.copied.gaps(start, end):
                parts.append((key, first, count))
        if not parts:
            self._tree.touch(steps, now_s)
        elif not self._hold(steps, page_bytes, now_s):
            return None
        copied, places = 0, []
        if owner is not None:
            for key, _, _ in steps:
                entries[key].owner = owner
        if not parts:
            return None
        for key, first, count in parts:
            entry = entries[key]
            entry.copied.add(first, count)
            copied += count * entry.page_cost
            places.append((entry.node, first, count))
        self._numbered += 1
        ticket = Ticket(self._numbered, model, self._families[model], copied, tuple(places), tuple(steps))
        self._open.setdefault(model, {})[ticket.id] = ticket
        self._waiting[ticket.id] = (1 << self.ranks) - 1
        return ticket

    def commit(self, ticket: Ticket, rank: int, *, state_complete: bool = True) -> None:
        """One rank has its copy; the last one exposes it. ``state_complete`` is False if its recurrent state is not.

        Raises ValueError if this rank has no part in the ticket any more.
        """
        waiting = self._waiting.get(ticket.id, 0)
        if rank < 0 or not waiting >> rank & 1:
            raise ValueError(f"rank {rank} has nothing to commit in ticket {ticket.id}")
        self._waiting[ticket.id] = waiting & ~(1 << rank)
        if not state_complete:
            self._torn.add(ticket.id)
        if not self._waiting[ticket.id]:
            self.commit_all(ticket)

    def commit_all(self, ticket: Ticket) -> None:
        """All ranks that had not yet committed do so now."""
        torn = ticket.id in self._torn
        self._end(ticket)
        for node, first, count in ticket.parts:
            entry = self._tree.entries[(ticket.model, node)]
            entry.committed.add(first, count)
            if torn:
                entry.incomplete.update(self._positions(ticket.model, first, first + count))

    def abort(self, ticket: Ticket) -> None:
        """The copy will not complete: nothing of it is exposed, and its slabs are reclaimed where nothing is beyond."""
        for entry, _, _ in reversed(self._end(ticket)):
            for node, first, count in ticket.parts:
                if entry.key == (ticket.model, node):
                    entry.copied.remove(first, count)
            before = entry.end_page
            self._drop_pages(entry, before - self._tree.trim(entry, max(entry.first_page, entry.copied.end)))

    def _end(self, ticket: Ticket) -> list[tuple[HostEntry, int, int]]:
        """Close a ticket and let go of its path, which is returned."""
        if self._waiting.pop(ticket.id, None) is None:
            raise ValueError(f"ticket {ticket.id} has ended")
        del self._open[ticket.model][ticket.id]
        self._torn.discard(ticket.id)
        return self._tree.unhold(ticket.path, NO_USE_S)

    def outstanding(self, model: str) -> tuple[Ticket, ...]:
        """Copies to drain before this model's KV region may be released (SPEC §5.2, switch barrier)."""
        return tuple(self._open.get(model, {}).values())

    # --- what a return can use -------------------------------------------------------------------------------------

    def match(self, model: str, spans: Spans, from_tokens: int = 0) -> int:
        """End of the prefix that all ranks have committed and that continues a device prefix of ``from_tokens``; page aligned.

        ``from_tokens`` itself if nothing does. A recurrent model's match ends at a checkpointed position.
        """
        if not spans or spans[-1][2] // self.page_tokens <= from_tokens // self.page_tokens:
            return from_tokens
        end = self._agreed(model, spans, from_tokens)
        if end > from_tokens and self._families.get(model) == "recurrent":
            end = self._resumable(model, spans, end)
        return end if end > from_tokens else from_tokens

    def declines(self, model: str, spans: Spans, from_tokens: int = 0) -> bool:
        """Whether a restore that begins now is declined for want of a complete state; counts it if so (SPEC §5.2)."""
        family = self._families.get(model, "")
        declined = self._agreed(model, spans, from_tokens) > from_tokens == self.match(model, spans, from_tokens)
        if declined:
            self.restore_skips[family] += 1
        return declined

    def _agreed(self, model: str, spans: Spans, from_tokens: int) -> int:
        entries, page_tokens = self._tree.entries, self.page_tokens
        at = from_tokens // page_tokens
        for node, _, end_tokens in spans:
            end = end_tokens // page_tokens
            if end <= at:  # on the device already, or no page of this node's own
                continue
            entry = entries.get((model, node))
            if entry is None:
                break
            reached = entry.committed.run_end(at)
            if reached < end:
                if reached > at:
                    at = reached
                break
            at = end
        return at * page_tokens

    def _resumable(self, model: str, spans: Spans, end_tokens: int) -> int:
        """The longest checkpointed position within ``end_tokens`` whose recurrent state is complete; 0 if none is."""
        for page in reversed(self._positions(model, 0, end_tokens // self.page_tokens)):
            node = next(node for node, _, end in spans if page * self.page_tokens <= end)
            entry = self._tree.entries.get((model, node))
            if entry is None or page not in entry.incomplete:
                return page * self.page_tokens
        return 0

    def _positions(self, model: str, first_page: int, end_page: int) -> range:
        """End pages of the checkpoint positions whose state belongs to the pages [first_page, end_page)."""
        spacing = self._spacing_pages[model]
        return range(first_page // spacing * spacing + spacing, end_page + 1, spacing)

    # --- holds and room --------------------------------------------------------------------------------------------

    def pin(self, model: str, spans: Spans, tokens: int) -> Hold:
        """A DMA pin on the first ``tokens`` of a path, which must be held here. Raises ValueError otherwise."""
        return self._keep(self._pins, model, spans, tokens)

    def unpin(self, hold: Hold) -> None:
        self._let_go(self._pins, hold)

    def ref(self, model: str, spans: Spans, tokens: int) -> Hold:
        """A radix reference, apart from DMA pins: either alone keeps a block (SPEC §5.2, lifetime separation)."""
        return self._keep(self._references, model, spans, tokens)

    def unref(self, hold: Hold) -> None:
        self._let_go(self._references, hold)

    def drop(self, model: str) -> None:
        """Forget a model. Raises ValueError while one of its copies is pending or one of its paths is held."""
        entries = [entry for key, entry in self._tree.entries.items() if isinstance(key, tuple) and key[0] == model]
        if any(entry.holds for entry in entries):
            raise ValueError(f"{model} has pending copies, pins or references: drain them first")
        for entry in reversed(entries):  # children were made after their parents
            pages = entry.end_page - entry.first_page
            self._tree.trim(entry, entry.first_page)
            self._drop_pages(entry, pages)
        self._families.pop(model, None)
        self._spacing_pages.pop(model, None)
        self._open.pop(model, None)

    def _keep(self, holds: dict[int, Hold], model: str, spans: Spans, tokens: int) -> Hold:
        cut = tuple((node, start, min(end, tokens)) for node, start, end in spans if start < tokens)
        steps = self._steps(model, cut)
        if self._tree.shortfall(steps, 1)[0]:
            raise ValueError(f"{tokens} tokens of {model} are not all held here")
        self._tree.hold(steps, 1, NO_USE_S)
        self._numbered += 1
        hold = Hold(self._numbered, tuple(steps))
        holds[hold.id] = hold
        return hold

    def _let_go(self, holds: dict[int, Hold], hold: Hold) -> None:
        if holds.pop(hold.id, None) is None:
            raise ValueError(f"hold {hold.id} has ended or is of the other kind")
        self._tree.unhold(hold.path, NO_USE_S)

    def _hold(self, steps: list[Step], page_bytes: int, now_s: float) -> bool:
        """Hold a path for a copy, making room for its new pages; False, with nothing changed, if there is none."""
        tree = self._tree
        lacking = 0
        if tree.cost + steps[-1][2] * page_bytes > self.capacity_bytes:  # else there is room even if nothing of the path is here
            missing, idle = tree.shortfall(steps, page_bytes)
            lacking = tree.cost + missing - self.capacity_bytes
            if lacking > 0 and lacking > tree.cost - tree.held_cost - idle:
                return False
        grown = tree.hold(steps, page_bytes, now_s)
        if self._forest is not None:
            for entry, pages in grown:
                if pages == entry.end_page - entry.first_page:
                    self._forest.retain(entry.node)
        if lacking > 0:
            for entry, pages in tree.reclaim(lacking, self.protected):
                self.evictions += pages
                self._drop_pages(entry, pages)
        return True

    def _drop_pages(self, entry: HostEntry, pages: int) -> None:
        """An entry has lost its last ``pages`` to the tree, perhaps all it had."""
        if pages == 0:
            return
        entry.forget_cut(pages)
        if self._dropped is not None:
            assert isinstance(entry.key, tuple)
            self._dropped(entry.key[0], entry.node, entry.end_page, pages)
        if entry.end_page == entry.first_page and self._forest is not None:
            self._forest.release(entry.node)

    def _steps(self, model: str, spans: Spans) -> list[Step]:
        return [((model, node), first, end) for node, first, end in page_steps(spans, self.page_tokens, partial=False)]
