"""The books of an instance's host pool: which pages of which model are in which slabs, and who is at work on them (SPEC §5.2).

``HostRegistry`` decides, counting in pages; here its decisions become slab numbers, and the words of single ranks become its commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from talaria.gpu.memory.paths import Digest, Paths
from talaria.gpu.memory.slabs import SlabPool, Slabs
from talaria.substrate.extents import ExtentSet
from talaria.substrate.prefix import PrefixForest, Spans
from talaria.substrate.registry import Hold, HostRegistry, Ticket


class Grant(NamedTuple):
    """What a rank is to copy of the path that it offers."""

    pages: list[int]
    """Along the path, ascending."""
    slabs: list[int]
    """Of these pages, one page after another."""
    kept: bool
    """Whether the path is in the pool, or will be; False where it is full."""


class _Checkpoint:
    """A ticket whose copies are under way on some rank. Pages are numbers along its path, on which they are unique."""

    def __init__(self, ticket: Ticket, ranks: int, now_s: float) -> None:
        self.ticket = ticket
        self.now_s = now_s
        self.given = [ExtentSet() for _ in range(ranks)]
        self.done = [ExtentSet() for _ in range(ranks)]
        self.writers = 0
        """Grants whose end has not been told."""
        self.pages = sum(count for _, _, count in ticket.parts)
        self.closed = False
        self.limbo: list[int] = []
        """Slabs of a closed one that are nobody's, and that a writer may still touch."""

    def all_told(self) -> bool:
        """Whether every rank was given all of it and writes no more."""
        return not self.writers and all(given.total == self.pages for given in self.given)

    def agreed_pages(self) -> int:
        """How many of its pages all ranks have, from the first on."""
        agreed = 0
        for _, first, count in self.ticket.parts:
            end = min(done.run_end(first) for done in self.done)
            agreed += min(end - first, count)
            if end < first + count:
                break
        return agreed


@dataclass(frozen=True)
class _Held:
    spans: Spans
    reference: Hold
    pin: Hold | None = None


@dataclass(eq=False)
class Seat:
    """One rank of one running engine."""

    model: str
    """Its name in the registry, which says all that makes pages comparable."""
    rank: int
    page_slabs: int
    """That one page takes in one rank's partition."""
    drained: int = 0
    """Barriers that it has come to before another rank has."""
    grants: dict[int, list[tuple[_Checkpoint, list[tuple[int, int]]]]] = field(default_factory=dict)
    held: dict[str, _Held] = field(default_factory=dict)
    """By request: the path that is to be restored for it."""


class HostStore:
    """``slabs`` of ``slab_bytes`` in each of ``ranks`` partitions. Times are seconds of any clock that does not go back."""

    def __init__(self, slabs: int, slab_bytes: int, ranks: int) -> None:
        self.slab_bytes = slab_bytes
        self.ranks = ranks
        self.pool = SlabPool(slabs)
        self._forest = PrefixForest()
        self.paths = Paths(self._forest)
        self.registry = HostRegistry(slabs * slab_bytes * ranks, ranks, 1, forest=self._forest, dropped=self._dropped)
        self.version = 0
        """Changes with everything that ``restorable`` depends on."""
        self.restored_bytes = 0
        """Copied to devices or on the way there, over all ranks, since the start."""
        self.failed_copies = 0
        """Either way, as the ranks say: what was to be kept is void, what was to be restored is recomputed."""
        self._slabs: dict[tuple[str, int], dict[int, Slabs]] = {}
        """(model, node) → its pages → where they are."""
        self._seats: dict[str, set[Seat]] = {}
        self._leaving: set[Seat] = set()
        """Ranks of which nothing more is heard, and whose processes may still be at work on what they were given."""
        self._families: dict[str, tuple[str, int]] = {}
        self._open: dict[str, dict[int, _Checkpoint]] = {}
        self._limbo = 0

    # --- ranks -----------------------------------------------------------------------------------------------------

    def join(self, model: str, rank: int, page_bytes: int, family: str = "mha", checkpoint_pages: int = 0) -> Seat:
        """A rank of an engine whose page takes ``page_bytes`` on each rank. Raises ValueError where it cannot be one."""
        seats = self._seats.setdefault(model, set())
        if not 0 <= rank < self.ranks or any(seat.rank == rank for seat in seats):
            raise ValueError(f"rank {rank} of {self.ranks} of {model} is taken or none")
        seat = Seat(model, rank, -(-page_bytes // self.slab_bytes))
        if seat.page_slabs > self.pool.total:
            room, page = (round(count * self.slab_bytes / 2**20, 1) for count in (self.pool.total, seat.page_slabs))
            raise ValueError(f"the host pool has {room} MiB a rank, and one page of {model} takes {page}: raise host_kv_gib")
        self.registry.register(model, family, checkpoint_pages)
        self._families[model] = (family, checkpoint_pages)
        seats.add(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """Nothing more is heard of the rank: what all ranks have said to be there is kept, the rest is void.

        Until ``gone`` its process may write where it was told to, and read what was found for it: nobody else gets these slabs.
        """
        self._seats[seat.model].discard(seat)
        self._leaving.add(seat)
        self._close_all(seat.model)

    def gone(self, seat: Seat) -> None:
        """The process of a rank that has left is no more."""
        self._leaving.discard(seat)
        self._let_go(seat)
        self._end_grants(seat)

    def drain(self, seat: Seat) -> None:
        """The rank's copies have ended. When all ranks have come here, the model's checkpoints are closed (the switch barrier)."""
        seat.drained += 1
        self._let_go(seat)
        self._end_grants(seat)
        seats = self._seats[seat.model]
        if len(seats) == self.ranks and all(other.drained for other in seats):
            self._close_all(seat.model)
            for other in seats:
                other.drained -= 1

    def _let_go(self, seat: Seat) -> None:
        for request in list(seat.held):
            self.done(seat, request)

    def _end_grants(self, seat: Seat) -> None:
        for number in list(seat.grants):
            self._ended(seat, number, complete=False)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, seat: Seat, number: int, chain: Sequence[Digest], now_s: float) -> Grant:
        """The rank has the pages of a whole path on its device: which of them it is to copy, and where to. ``saved`` ends it."""
        model = seat.model
        spans = self.paths.insert(model, chain)
        ticket = self.registry.checkpoint(model, spans, seat.page_slabs * self.slab_bytes * self.ranks, now_s)
        if ticket is None:
            self.paths.let_go(spans)
        elif self._place(ticket, seat.page_slabs):
            self._open.setdefault(model, {})[ticket.id] = _Checkpoint(ticket, self.ranks, now_s)
        else:
            self.registry.abort(ticket)
        grant = Grant([], [], len(chain) - 1 in self._slabs.get((model, spans[-1][0]), ()))
        ends = {node: end for node, _, end in spans}
        for checkpoint in self._open.get(model, {}).values():
            self._give(seat, number, checkpoint, ends, grant)
        return grant

    def _place(self, ticket: Ticket, page_slabs: int) -> bool:
        """Slabs for the pages of a new ticket; False if dying writers still keep too many."""
        wanted = [(node, page) for node, first, count in ticket.parts for page in range(first, first + count)]
        if len(wanted) * page_slabs > self.pool.free:
            return False
        taken = self.pool.take(len(wanted) * page_slabs)
        for index, (node, page) in enumerate(wanted):
            self._slabs.setdefault((ticket.model, node), {})[page] = taken[index * page_slabs : (index + 1) * page_slabs]
        return True

    def _give(self, seat: Seat, number: int, checkpoint: _Checkpoint, ends: dict[int, int], grant: Grant) -> None:
        """What the rank has not been given of a checkpoint's pages and has on its path, whose nodes end at ``ends``."""
        mine, given = [], checkpoint.given[seat.rank]
        for node, first, count in checkpoint.ticket.parts:
            for start, size in given.gaps(first, min(first + count, ends.get(node, first))):
                given.add(start, size)
                mine.append((start, size))
                places = self._slabs[(seat.model, node)]
                for page in range(start, start + size):
                    grant.pages.append(page)
                    grant.slabs.extend(places[page])
        if mine:
            checkpoint.writers += 1
            seat.grants.setdefault(number, []).append((checkpoint, mine))

    def saved(self, seat: Seat, number: int, *, complete: bool) -> None:
        """The rank writes no more of what ``save`` gave it, and has all of it, or is not to be trusted."""
        self.failed_copies += not complete
        self._ended(seat, number, complete=complete)

    def _ended(self, seat: Seat, number: int, *, complete: bool) -> None:
        for checkpoint, pages in seat.grants.pop(number, ()):
            checkpoint.writers -= 1
            if checkpoint.closed:
                self._leave_limbo(checkpoint)
                continue
            if complete:
                done = checkpoint.done[seat.rank]
                for first, count in pages:
                    done.add(first, count)
                if done.total == checkpoint.pages:
                    self.registry.commit(checkpoint.ticket, seat.rank)
            if checkpoint.all_told():
                self._conclude(checkpoint)

    def _conclude(self, checkpoint: _Checkpoint) -> None:
        """Every rank has said how its copies of all pages ended: where one failed, a later offer may begin anew."""
        if all(rank.total == checkpoint.pages for rank in checkpoint.done):
            del self._open[checkpoint.ticket.model][checkpoint.ticket.id]
            self.version += 1
        else:
            self._close(checkpoint)

    def _close_all(self, model: str) -> None:
        for checkpoint in list(self._open.get(model, {}).values()):
            self._close(checkpoint)

    def _close(self, checkpoint: _Checkpoint) -> None:
        """Nothing more will come of it: expose what all ranks have, from its first page on."""
        ticket, agreed, model = checkpoint.ticket, checkpoint.agreed_pages(), checkpoint.ticket.model
        del self._open[model][ticket.id]
        checkpoint.closed = True
        self.version += 1
        keep: dict[tuple[int, int], Slabs] = {}
        for node, first, count in ticket.parts:
            places = self._slabs[(model, node)]
            for page in range(first, first + count):
                if len(keep) < agreed:
                    keep[(node, page)] = places.pop(page)
                else:
                    checkpoint.limbo += places.pop(page)
        self._limbo += len(checkpoint.limbo)
        steps = self._steps(ticket)
        for node, _, _ in steps:  # the path stays known while nothing holds it
            self._forest.retain(node)
        self.registry.abort(ticket)
        self._leave_limbo(checkpoint)
        if keep:
            self._expose(ticket.model, steps, keep, checkpoint.now_s)
        for node, _, _ in steps:
            self._forest.release(node)

    def _expose(self, model: str, path: Spans, keep: dict[tuple[int, int], Slabs], now_s: float) -> None:
        """The first pages of a ticket that was given up, and where they are; void, too, where something before them is."""
        end = max(page for _, page in keep) + 1
        spans = tuple((node, first, min(last, end)) for node, first, last in path if first < end)
        page_bytes = len(next(iter(keep.values()))) * self.slab_bytes * self.ranks
        shorter = self.registry.checkpoint(model, spans, page_bytes, now_s)
        if shorter is not None and sum(count for _, _, count in shorter.parts) == len(keep):
            self.registry.commit_all(shorter)
            for (node, page), slabs in keep.items():
                self._slabs.setdefault((model, node), {})[page] = slabs
            return
        if shorter is not None:  # pages before them are void, and nobody comes as far as these
            self.registry.abort(shorter)
        for slabs in keep.values():
            self.pool.give(slabs)

    @staticmethod
    def _steps(ticket: Ticket) -> Spans:
        return tuple((key[1], first, end) for key, first, end in ticket.path if isinstance(key, tuple))

    def _leave_limbo(self, checkpoint: _Checkpoint) -> None:
        if not checkpoint.writers and checkpoint.limbo:
            self._limbo -= len(checkpoint.limbo)
            self.pool.give(checkpoint.limbo)
            checkpoint.limbo = []

    def _dropped(self, model: str, node: int, first_page: int, pages: int) -> None:
        self.version += 1
        places = self._slabs.get((model, node), {})
        for page in range(first_page, first_page + pages):
            if page in places:
                self.pool.give(places.pop(page))
        if not places:
            self._slabs.pop((model, node), None)

    # --- restores --------------------------------------------------------------------------------------------------

    def find(self, seat: Seat, request: str, digests: Sequence[Digest]) -> tuple[int, list[int]]:
        """(pages, their slabs): how many of a prompt's pages, from where the device has no more of it, can be restored.

        Until ``done`` the request refers to them, so that they stay.
        """
        self.done(seat, request)
        found = self.paths.find(seat.model, digests)
        if found is None:
            return 0, []
        first = found.first_page
        end = self.registry.match(seat.model, found.spans, first)
        if end == first:
            self.registry.declines(seat.model, found.spans, first)
            return 0, []
        seat.held[request] = _Held(found.spans, self.registry.ref(seat.model, found.spans, end))
        slabs: list[int] = []
        for node, start, stop in found.spans:
            places = self._slabs.get((seat.model, node), {})
            for page in range(max(start, first), min(stop, end)):
                slabs.extend(places[page])
        return end - first, slabs

    def pin(self, seat: Seat, request: str, pages: int) -> None:
        """The copy of the request's prefix, ``pages`` of the whole prompt, begins."""
        held = seat.held.get(request)
        if held is not None and held.pin is None:
            self.restored_bytes += pages * seat.page_slabs * self.slab_bytes
            seat.held[request] = _Held(held.spans, held.reference, self.registry.pin(seat.model, held.spans, held.reference.path[-1][2]))

    def done(self, seat: Seat, request: str, *, complete: bool = True) -> None:
        """It has been copied, will not be, or could not be (``complete`` is False)."""
        self.failed_copies += not complete
        held = seat.held.pop(request, None)
        if held is not None:
            if held.pin is not None:
                self.registry.unpin(held.pin)
            self.registry.unref(held.reference)

    def clear(self) -> None:
        """Forget everything, while no rank restores anything."""
        for model, (family, checkpoint_pages) in self._families.items():
            for seat in (*self._seats[model], *(left for left in self._leaving if left.model == model)):
                self._let_go(seat)
            self._close_all(model)
            self.registry.drop(model)
            self.registry.register(model, family, checkpoint_pages)

    # --- what others may know --------------------------------------------------------------------------------------

    def restorable(self, model: str, names: Sequence[int], from_page: int) -> int:
        """Where a prefix ends that the device has up to ``from_page`` and the host continues, by the names of the prompt's pages."""
        return self.registry.match(model, self.paths.guess(model, names), from_page)

    @property
    def used_bytes(self) -> int:
        return self.registry.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.registry.capacity_bytes

    def audit(self) -> list[str]:
        """What does not balance; empty in a correct run."""
        wrong = []
        taken = [number for places in self._slabs.values() for slabs in places.values() for number in slabs]
        if len(taken) != len(set(taken)):
            wrong.append("a slab holds two pages")
        if len(taken) + self._limbo + self.pool.free != self.pool.total:
            wrong.append(f"{self.pool.total} slabs, but {len(taken)} hold pages, {self._limbo} are in limbo and {self.pool.free} free")
        if len(taken) * self.slab_bytes * self.ranks > self.registry.used_bytes:
            wrong.append(f"{len(taken)} slabs hold pages, the registry counts {self.registry.used_bytes} bytes")
        idle = not any(seat.grants or seat.held for seats in (*self._seats.values(), self._leaving) for seat in seats)
        if idle and not any(self._open.values()) and self.registry.held_bytes:
            wrong.append(f"{self.registry.held_bytes} bytes are held by nobody")
        return wrong
