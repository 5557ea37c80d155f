"""A third model in a host pool, of which only the ranks' ends of the pool exist: its copies begin and end when the test says so.

It is a recurrent one, which resumes where its state was kept and nowhere else.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from talaria.gpu.memory.server import MemoryServer
from tests.gpu.memory.ranks import Rank

MODEL = "bystander"
SPACING_PAGES = 2
MOST_PAGES = 8
"""Of a path; what comes back goes to as many other pages of the device."""
PATIENCE_S = 60.0


class Bystander:
    def __init__(self, memory: MemoryServer, draw: random.Random) -> None:
        self._memory, self._draw = memory, draw
        self._ranks: list[Rank] = []
        self._last: tuple[list[str], list[int]] = ([], [])
        """What was saved last, and the value of each page's bytes."""
        self._numbered = 0
        self.copying = False

    async def join(self) -> None:
        path, ranks = self._memory.path, self._memory.store.ranks
        assert path is not None
        for rank in range(ranks):  # the server needs the event loop meanwhile
            self._ranks.append(await asyncio.to_thread(self._rank, path, rank, ranks))

    @staticmethod
    def _rank(path: Path, rank: int, ranks: int) -> Rank:
        return Rank(path, rank=rank, ranks=ranks, model=MODEL, family="recurrent", checkpoint_pages=SPACING_PAGES)

    async def leave(self) -> None:
        while self._ranks:
            await asyncio.to_thread(self._ranks.pop().close)

    def begin(self) -> None:
        """Copies of a new path are under way from now on, on all ranks."""
        self.copying = True
        for rank in self._ranks:
            rank.saving.opened.clear()
        self._offer()

    def _offer(self) -> None:
        pages = self._draw.randint(1, MOST_PAGES)
        digests = [self._draw.randbytes(32).hex() for _ in range(pages)]
        self._last = digests, [self._draw.randrange(1, 256) for _ in range(pages)]
        for rank in self._ranks:
            for page, value in enumerate(self._last[1]):
                rank.fill(page, value)
            rank.offer(digests, list(range(pages)))

    async def end(self) -> None:
        """One rank after the other."""
        for rank in self._draw.sample(self._ranks, len(self._ranks)):
            rank.saving.opened.set()
            await asyncio.to_thread(rank.checkpoints.drain, time.monotonic() + PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while any(self._memory.store._open.get(self._name, ())):
                await asyncio.sleep(0.005)
        self.copying = False

    async def crowd(self, paths: int) -> None:
        """So many new paths, one after the other: others have to go for them."""
        for _ in range(paths):
            self._offer()
            await self.end()

    async def come_back(self) -> None:
        """What was saved last comes back to other pages, as far as all ranks have it; its bytes are what they were."""
        digests, values = self._last
        self._numbered += 1
        request = f"return {self._numbered}"
        found = [await asyncio.to_thread(rank.restores.find, request, digests) for rank in self._ranks]
        agreed = min(found, default=0)
        assert agreed % SPACING_PAGES == 0
        pages = list(range(MOST_PAGES, MOST_PAGES + agreed))
        for rank in self._ranks:
            if agreed:
                rank.restores.queue(request, pages)
            rank.restores.keep(())
            batch = rank.restores.start(())
            assert batch < 0 or await asyncio.to_thread(rank.restores.finish, batch)
            assert [rank.values(page) for page in pages] == [{value} for value in values[:agreed]]

    @property
    def _name(self) -> str:
        return self._memory._names[MODEL]
