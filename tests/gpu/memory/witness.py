"""What the invariants of a host pool (SPEC §5.2) say, checked by somebody else's books after every message of a rank.

The books here know what single ranks have said: which page they have copied, into which slabs. What all of them have copied into the slabs
where the store has it is agreed. Everything else follows from that.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from talaria.gpu.memory.arenas import Arenas
from talaria.gpu.memory.paths import Digest
from talaria.gpu.memory.server import MemoryServer
from talaria.gpu.memory.slabs import Slabs
from talaria.gpu.memory.store import Grant, HostStore, Seat
from talaria.substrate.registry import Hold

Chain = tuple[Digest, ...]
Page = tuple[str, Digest]
MOST_FAULTS = 20


def served(model: str) -> str:
    """What a model of the registry is called where it is served."""
    return model.partition("/")[0]


class Restore(NamedTuple):
    """What was found for a request of one rank."""

    pages: dict[Page, Slabs]
    offered: int
    """Pages that SGLang hears of: a rank that lags says less."""
    pinned: bool = False


class Keep(NamedTuple):
    """A pin or a reference of the test's own."""

    pages: dict[Page, Slabs]
    hold: Hold
    pinned: bool


class Witness:
    """Stands between a server and its store, which has to be empty and idle."""

    def __init__(self, memory: MemoryServer, lag_pages: int, own: str) -> None:
        """``own``: a model whose ranks are this process's, which lives on."""
        self._own = own
        self._store, self._server, self._lag_pages = memory.store, memory, lag_pages
        memory.store = cast(HostStore, self)
        self.faults: list[str] = []
        self.lags = False
        """Rank 1 of an engine offers ``lag_pages`` less than it has found."""
        self.seen: Counter[str] = Counter()
        """How often what the invariants are about has come up."""
        self._chains: dict[str, dict[Digest, Chain]] = {}
        """Of every path that was ever offered, by model and last digest."""
        self._copied: dict[tuple[str, int], dict[Digest, Slabs]] = {}
        """What a rank has said to be there, and where."""
        self._granted: dict[tuple[Seat, int], dict[Digest, Slabs]] = {}
        self._restores: dict[tuple[Seat, str], Restore] = {}
        self._rounds: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        """Model and request → rank → what it offered and what it restores."""
        self._keeps: list[Keep] = []
        self._skips = 0
        self._agreed: set[Page] = set()
        """Published or, while a checkpoint is open, about to be."""
        self._sums: dict[Page, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    # --- messages ----------------------------------------------------------------------------------------------------

    def save(self, seat: Seat, number: int, chain: Sequence[Digest], now_s: float) -> Grant:
        for digest in chain:
            if self._place(seat.model, digest) is None:  # whatever was there once is gone
                for rank in range(self._store.ranks):
                    self._copied.get((seat.model, rank), {}).pop(digest, None)
        grant = self._store.save(seat, number, chain, now_s)
        self._remember(seat.model, tuple(chain))
        slabs = [tuple(grant.slabs[at : at + seat.page_slabs]) for at in range(0, len(grant.slabs), seat.page_slabs)]
        granted = {chain[page]: places for page, places in zip(grant.pages, slabs, strict=True)}
        self._granted[seat, number] = granted
        for digest in granted:
            self._copied.setdefault((seat.model, seat.rank), {}).pop(digest, None)
        self._judge("save")
        return grant

    def _remember(self, model: str, chain: Chain) -> None:
        known = self._chains.setdefault(model, {})
        for digest in chain[:-1]:
            known.pop(digest, None)
        if not any(chain[-1] in longer for longer in known.values()):
            known[chain[-1]] = chain

    def saved(self, seat: Seat, number: int, *, complete: bool) -> None:
        granted = self._granted.pop((seat, number), {})
        if complete:
            self._copied.setdefault((seat.model, seat.rank), {}).update(granted)
        self._store.saved(seat, number, complete=complete)
        self._judge("saved")

    def find(self, seat: Seat, request: str, digests: Sequence[Digest]) -> tuple[int, list[int]]:
        self._restores.pop((seat, request), None)
        known = self._store.paths.find(seat.model, digests)
        first = known.first_page if known is not None else 0
        agreed = self._run(seat.model, digests)
        pages, slabs = self._store.find(seat, request, digests)
        places = [tuple(slabs[at : at + seat.page_slabs]) for at in range(0, len(slabs), seat.page_slabs)]
        found = dict(zip(((seat.model, digest) for digest in digests[:pages]), places, strict=True))
        self._expect(all(self._place(*page) == place for page, place in found.items()), "found where it is not")
        self._expect(pages <= agreed, f"{pages} pages of {seat.model} are found, ranks agree on {agreed}")
        if not self._copying(seat.model):
            longest = self._resumable(seat.model, first + agreed)
            self._expect(first + pages == max(first, longest), f"{pages} pages are found behind {first}, not up to {longest}")
        self._skips += agreed > 0 == pages and self._spacing(seat.model) > 1
        if pages:
            lacks = self._lag_pages if self.lags and seat.rank == 1 and served(seat.model) != self._own else 0
            self._restores[seat, request] = Restore(found, max(0, pages - lacks))
        self._judge("find")
        return pages, slabs

    def pin(self, seat: Seat, request: str, pages: int) -> None:
        self._store.pin(seat, request, pages)
        found = self._restores.get((seat, request))
        if found is not None:  # else it has been forgotten meanwhile, and is not pinned
            self._restores[seat, request] = found._replace(pinned=True)
            offers = self._rounds.setdefault((seat.model, request), {})
            offers[seat.rank] = (found.offered, pages)
            if len(offers) == self._store.ranks:
                agreed, restored = min(offered for offered, _ in offers.values()), {pages for _, pages in offers.values()}
                self._expect(restored == {agreed}, f"ranks agree on {agreed} pages and restore {sorted(restored)}")
                self.seen[f"pages restored of {served(seat.model)}"] += agreed
                self.seen["ranks of unequal knowledge"] += len({offered for offered, _ in offers.values()}) > 1
                del self._rounds[seat.model, request]
        self._judge("pin")

    def done(self, seat: Seat, request: str, *, complete: bool = True) -> None:
        self._restores.pop((seat, request), None)
        self._store.done(seat, request, complete=complete)
        self._judge("done")

    def leave(self, seat: Seat) -> None:
        self._store.leave(seat)
        self._judge("leave")

    def drain(self, seat: Seat) -> None:
        self._give_up(seat, "drain", self._store.drain)

    def gone(self, seat: Seat) -> None:
        self._give_up(seat, "gone", self._store.gone)

    def _give_up(self, seat: Seat, message: str, tell: Callable[[Seat], None]) -> None:
        """Nothing that the rank was given or has found is its own any more."""
        for books in (self._granted, self._restores):
            for key in [key for key in books if key[0] is seat]:
                del books[key]  # type: ignore[attr-defined]
        tell(seat)
        self._judge(message)

    def clear(self) -> None:
        self.let_go()
        self._restores.clear()
        self._rounds.clear()
        self._store.clear()
        self._copied.clear()
        self._agreed.clear()
        self._judge("clear")

    # --- the test's own pins and references ---------------------------------------------------------------------------

    def keep(self, model: str, number: int, *, pinned: bool) -> bool:
        """Pin what is published of one of the model's paths, or refer to it; neither comes with the other. False if nothing is."""
        chains = list(self._chains.get(model, {}).values())
        if not chains:
            return False
        chain = chains[number % len(chains)]
        end = self._published(model, chain)
        known = self._store.paths.find(model, chain)
        if not end or known is None:
            return False
        take = self._store.registry.pin if pinned else self._store.registry.ref
        pages = {(model, digest): place for digest in chain[:end] if (place := self._place(model, digest)) is not None}
        self._keeps.append(Keep(pages, take(model, known.spans, end), pinned))
        self.seen["pins alone" if pinned else "references alone"] += 1
        self._judge("keep")
        return True

    def let_go(self) -> None:
        while self._keeps:
            keep = self._keeps.pop()
            (self._store.registry.unpin if keep.pinned else self._store.registry.unref)(keep.hold)
            self._judge("let go")

    # --- the switch barrier --------------------------------------------------------------------------------------------

    def watch(self, arenas: Arenas) -> None:
        """A rank that parks gives up its KV."""
        parked = arenas.parked

        def at_barrier(rank: Any, message: Any) -> None:
            self._released(self._server._names[rank.model], rank.number)
            parked(rank, message)

        arenas.parked = at_barrier  # type: ignore[method-assign]

    def _released(self, model: str, rank: int) -> None:
        at_work = [seat for seat, _ in (*self._granted, *self._restores) if (seat.model, seat.rank) == (model, rank)]
        self._expect(not at_work and not self._copying(model), f"KV of {model} is given up before its copies have ended")
        self._expect(not self._store.registry.outstanding(model), f"KV of {model} is given up before its tickets have ended")
        self.seen["releases beside other models' copies"] += any(seat.model != model for seat, _ in self._granted)

    # --- what must hold --------------------------------------------------------------------------------------------------

    def _judge(self, message: str) -> None:
        """After every message."""
        self.seen[message] += 1
        store, before, evictions = self._store, self._agreed, self.seen["evictions"]
        self.seen["evictions"] = store.registry.evictions
        for fault in store.audit():
            self._expect(bool(self._keeps) and "by nobody" in fault, fault)  # the store does not know of the test's own
        agreed: set[Page] = set()
        for model, chain in self._all_chains():
            run, published = self._run(model, chain), self._published(model, chain)
            agreed.update((model, digest) for digest in chain[:run])
            fits = published <= self._resumable(model, run) if self._copying(model) else published == self._resumable(model, run)
            self._expect(fits, f"{published} pages of {model} are published, ranks agree on {run}")
        lost = before - agreed
        self._expect(len(lost) <= store.registry.evictions - evictions, f"{len(lost)} agreed pages are lost without being evicted")
        for model, _ in lost:
            self.seen[f"pages evicted of {served(model)}"] += 1
        self._agreed = agreed
        self._check_holds()
        self._check_writers()
        for page in agreed - self._sums.keys():
            self._sums[page] = self._read(page)
        for page in self._sums.keys() - agreed:
            del self._sums[page]

    def _check_holds(self) -> None:
        """Pins and references are as many as were taken, and either alone keeps its pages where they are."""
        registry = self._store.registry
        pins = sum(restore.pinned for restore in self._restores.values()) + sum(keep.pinned for keep in self._keeps)
        references = len(self._restores) + sum(not keep.pinned for keep in self._keeps)
        self._expect(len(registry._pins) == pins, f"{len(registry._pins)} pins, {pins} were taken")
        self._expect(len(registry._references) == references, f"{len(registry._references)} references, {references} were taken")
        for held in (*self._restores.values(), *self._keeps):
            self._expect(all(self._place(*page) == place for page, place in held.pages.items()), "a held page is reclaimed")

    def _check_writers(self) -> None:
        """What a rank may write to is nobody else's, and is not free."""
        pool = self._store.pool
        free = {number for first, count in pool._free for number in range(first, first + count)}
        owners = {
            slab: (model, node, page)
            for (model, node), places in self._store._slabs.items() for page, slabs in places.items() for slab in slabs
        }  # fmt: skip
        for (seat, _), granted in self._granted.items():
            for digest, slabs in granted.items():
                own = self._store.paths._place(seat.model, digest)
                others = {owners[slab] for slab in slabs if slab in owners} - {(seat.model, *(own or (-1, -1)))}
                self._expect(not free.intersection(slabs) and not others, "a rank writes to slabs that are not its own")

    def check(self) -> None:
        """At every step: nothing was wrong since the last one, and what is published is what was, byte for byte."""
        assert self.faults == [], self.faults
        for page, sums in self._sums.items():
            assert self._read(page) == sums, "a published page was written to"
        assert self._store.registry.restore_skips == {"mha": 0, "mla": 0, "recurrent": self._skips}

    def check_idle(self) -> None:
        """At the end: nobody has anything under way, and all slabs are free once everything is forgotten."""
        self.check()
        store = self._store
        assert not self._granted and not self._restores and not self._keeps and not self._rounds
        assert self.idle() and not any(store._open.values()) and not store._limbo
        assert not store.registry.held_bytes and not store.registry._pins and not store.registry._references
        self.clear()
        assert store.used_bytes == 0 and store.pool.free == store.pool.total and self.faults == []

    def idle(self) -> bool:
        """No rank is connected, and none of another process lives."""
        others = [seat for seat in self._store._leaving if served(seat.model) != self._own]
        return not any(self._store._seats.values()) and not others

    def quiet(self, model: str) -> bool:
        """Nothing of the served model is being copied."""
        return not self._copying(self._server._names[model])

    def name(self, model: str) -> str:
        return self._server._names[model]

    # --- what is where ---------------------------------------------------------------------------------------------------

    def _all_chains(self) -> Iterator[tuple[str, Chain]]:
        for model, chains in self._chains.items():
            for chain in chains.values():
                yield model, chain

    def _place(self, model: str, digest: Digest) -> Slabs | None:
        """Where the store has, or is about to have, a page."""
        known = self._store.paths._place(model, digest)
        return None if known is None else self._store._slabs.get((model, known[0]), {}).get(known[1])

    def _run(self, model: str, digests: Sequence[Digest]) -> int:
        """How many of these pages, from the first on, all ranks have copied to where the store has them."""
        copied = [self._copied.get((model, rank), {}) for rank in range(self._store.ranks)]
        for number, digest in enumerate(digests):
            place = self._place(model, digest)
            if place is None or any(said.get(digest) != place for said in copied):
                return number
        return len(digests)

    def _published(self, model: str, chain: Chain) -> int:
        known = self._store.paths.find(model, chain)
        return 0 if known is None else self._store.registry.match(model, known.spans)

    def _copying(self, model: str) -> bool:
        return bool(self._store._open.get(model))

    def _spacing(self, model: str) -> int:
        return max(1, self._store._families[model][1])

    def _resumable(self, model: str, pages: int) -> int:
        """A recurrent model goes on where its state was kept only."""
        return pages // self._spacing(model) * self._spacing(model)

    def _read(self, page: Page) -> list[int]:
        """A checksum of the page on each rank."""
        store, place = self._store, self._place(*page)
        partition, descriptor = store.pool.total * store.slab_bytes, self._server._pool.descriptor
        return [
            zlib.crc32(b"".join(os.pread(descriptor, store.slab_bytes, rank * partition + slab * store.slab_bytes) for slab in place or ()))
            for rank in range(store.ranks)
        ]

    def _expect(self, holds: bool, fault: str) -> None:
        if not holds and len(self.faults) < MOST_FAULTS:
            self.faults.append(fault)
