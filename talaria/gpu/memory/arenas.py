"""The agent's end of its engines' arenas: descriptors of chunks and images, who has an arena, and what it holds of whose weights.

The agent maps and copies nothing. What it keeps outlives every engine: physical memory is there as long as somebody has its descriptor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from talaria.gpu.memory.gather import NOTHING, Ledger
from talaria.gpu.memory.peer import Peer
from talaria.gpu.memory.wire import Connection
from talaria.gpu.protocol import arena as protocol
from talaria.gpu.protocol.arena import MOST_DESCRIPTORS
from talaria.substrate.switch import SwitchRecord

_BACKLOG: Final = 16
_log = logging.getLogger(__name__)


class RankTimes(NamedTuple):
    """SWITCH_TIMING of one rank."""

    record: SwitchRecord
    dirty_bytes: int


class _Arena:
    """Of one rank number."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.maker: _Rank | None = None
        """Who is making them."""
        self.owner: _Rank | None = None
        """Who may write to them."""
        self.waiting: deque[tuple[_Rank, int]] = deque()
        """Ranks that want it, and the numbers of their questions."""
        self.ledger = NOTHING
        self.teardown_s = 0.0
        """Of the last rank that parked."""


class Arenas:
    """``ranks`` arenas of ``count`` chunks each.

    ``lost(model)``: a rank's connection has ended, and its process lives on.
    """

    def __init__(
        self, ranks: int, count: int, chunk_bytes: int, *, check: bool = False, lost: Callable[[str], None] = lambda model: None
    ) -> None:
        self.path: Path | None = None
        self.count, self.chunk_bytes, self.check = count, chunk_bytes, check
        self._lost = lost
        self.on_staged: Callable[[str, int, protocol.Staged], None] | None = None
        """Called with the active model, the rank and its figures."""
        self._timed: dict[str, dict[int, RankTimes]] = {}
        """By model and rank, since it was last taken for the model."""
        self._timed_all = asyncio.Event()
        self.arenas = [_Arena() for _ in range(ranks)]
        self.images: dict[tuple[str, int], tuple[int, int]] = {}
        """(model, rank) → descriptor and bytes of its weights."""
        self.ranks: set[_Rank] = set()
        """With a connection."""
        self._leaving: set[asyncio.Task[None]] = set()
        """One for each that has none any more, until its process has ended."""
        self._replaced: list[int] = []
        self._listener: socket.socket | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, path: Path) -> None:
        """Raises OSError."""
        _allow_files()
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self.path = path

    async def stop(self) -> None:
        """The memory is gone with its last user."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        for rank in tuple(self.ranks):
            rank.connection.close()
        for leaving in self._leaving:
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        held = [descriptor for arena in self.arenas for descriptor in arena.chunks]
        for descriptor in [*held, *(descriptor for descriptor, _ in self.images.values()), *self._replaced]:
            os.close(descriptor)
        self.arenas, self.images = [], {}

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone away already
            return
        try:
            self.ranks.add(_Rank(self, connection))
        except OSError as error:
            _log.error("event=rank_lost why=%r", error)
            connection.close()

    # --- what engines do ---------------------------------------------------------------------------------------------

    def attached(self, rank: _Rank, message: protocol.Attach) -> None:
        if message.ranks != len(self.arenas) or not 0 <= message.rank < message.ranks:
            rank.connection.send(protocol.Refused(f"rank {message.rank} of {message.ranks}, the instance has {len(self.arenas)}"))
            return
        arena = self.arenas[message.rank]
        if not arena.chunks and arena.maker is not None:
            rank.connection.send(protocol.Refused("another engine is making the arena"))
            return
        rank.model, rank.number = message.model, message.rank
        image, image_bytes = self.images.get((message.model, message.rank), (-1, 0))
        welcome = protocol.Welcome(self.count, self.chunk_bytes, bool(arena.chunks), self.check, image_bytes)
        if not arena.chunks:
            arena.maker = rank  # before anything is sent: that may find the rank gone
        rank.connection.send(welcome, [image] if image_bytes else [])
        for at in range(0, len(arena.chunks), MOST_DESCRIPTORS):
            some = arena.chunks[at : at + MOST_DESCRIPTORS]
            rank.connection.send(protocol.Chunks(len(some)), some)

    def made(self, rank: _Rank, message: protocol.Chunks) -> None:
        arena = self.arenas[rank.number]
        if arena.maker is not rank or len(rank.made) + message.count > self.count:
            raise ValueError("chunks that nobody asked for")
        for _ in range(message.count):
            rank.made.append(rank.connection.incoming.descriptors.popleft())
        if len(rank.made) == self.count:
            arena.chunks, rank.made, arena.maker = rank.made, [], None

    def kept(self, rank: _Rank, message: protocol.Keep) -> None:
        """A new image, in place of one that had another size."""
        descriptor = rank.connection.incoming.descriptors.popleft()
        before = self.images.get((rank.model, rank.number))
        if before is not None:
            self._replaced.append(before[0])  # it may still be on its way to somebody
        self.images[rank.model, rank.number] = (descriptor, message.nbytes)

    def taken(self, rank: _Rank, number: int) -> None:
        self.arenas[rank.number].waiting.append((rank, number))
        self._give(self.arenas[rank.number])

    def parked(self, rank: _Rank, message: protocol.Park) -> None:
        arena = self.arenas[rank.number]
        if arena.owner is not rank:
            raise ValueError("parked what it has not taken")
        arena.owner = None
        arena.ledger = Ledger(message.model, message.staged, message.dirty_bytes)
        arena.teardown_s = message.teardown_s
        self._give(arena)

    def timed(self, rank: _Rank, message: protocol.Timed) -> None:
        phases_s = (self.arenas[rank.number].teardown_s, *message.phases_s)
        record = SwitchRecord(phases_s, message.path, message.d2d_bytes, message.h2d_bytes)
        self._timed.setdefault(rank.model, {})[rank.number] = RankTimes(record, message.dirty_bytes)
        self._timed_all.set()

    def lost(self, rank: _Rank) -> None:
        """Its connection has ended. What it had is still its own: it may be writing there as long as its process lives."""
        self.ranks.discard(rank)
        while rank.made:
            os.close(rank.made.pop())
        if rank.number < 0:
            rank.peer.close()
            return
        arena = self.arenas[rank.number]
        arena.waiting = deque(item for item in arena.waiting if item[0] is not rank)
        leaving = asyncio.create_task(self._leave(rank, arena))
        leaving.add_done_callback(lambda task: rank.peer.close())
        leaving.add_done_callback(self._leaving.discard)
        self._leaving.add(leaving)

    async def _leave(self, rank: _Rank, arena: _Arena) -> None:
        """What the arena holds is nobody's if this rank had it."""
        await rank.peer.gone(lambda: self._lost(rank.model))
        if arena.maker is rank:
            arena.maker = None
        if arena.owner is rank:
            arena.owner, arena.ledger, arena.teardown_s = None, NOTHING, 0.0
            self._give(arena)

    def _give(self, arena: _Arena) -> None:
        if arena.owner is None and arena.waiting:
            rank, number = arena.waiting.popleft()
            arena.owner = rank
            self._timed.get(rank.model, {}).pop(rank.number, None)
            ledger, arena.ledger = arena.ledger, NOTHING
            ours = ledger if ledger.model == rank.model else NOTHING
            rank.connection.send(protocol.Taken(number, ours.staged, ours.dirty_bytes))

    async def switched(self, model: str) -> list[RankTimes]:
        """The records of all ranks, once they have let go on; they come at about the time of the engine's answer to that."""
        while len(self._timed.get(model, {})) < len(self.arenas):
            self._timed_all.clear()
            await self._timed_all.wait()
        return list(self._timed[model].values())

    # --- what the agent wants ----------------------------------------------------------------------------------------

    def stage(self, active: str, model: str, bytes_per_s: float) -> None:
        """Every rank of the active model stages ``model`` as fast as that at most; an empty name: nothing. What was never open is not."""
        for rank in tuple(self.ranks):  # one that is gone leaves them
            if rank.model == active:
                image, nbytes = self.images.get((model, rank.number), (-1, 0))
                stage = protocol.Stage(model, nbytes, bytes_per_s) if nbytes else protocol.Stage("", 0, 0.0)
                rank.connection.send(stage, [image] if nbytes else [])

    def owners(self) -> list[str | None]:
        """Whose each rank's arena is."""
        return [None if arena.owner is None else arena.owner.model for arena in self.arenas]

    @property
    def image_bytes(self) -> int:
        """Host memory that holds weights, over all models and ranks."""
        return sum(nbytes for _, nbytes in self.images.values())


class _Rank:
    """One rank of one engine."""

    def __init__(self, arenas: Arenas, connection: socket.socket) -> None:
        """Raises OSError where it is gone already."""
        self.model, self.number = "", -1
        self.made: list[int] = []
        """Descriptors of chunks, until there are all."""
        self._arenas = arenas
        self.peer = Peer(connection)
        self.connection = Connection(connection, protocol.FromRank, self._received, self._lost)

    def _received(self, message: protocol.FromRank) -> None:
        """Raises ValueError or IndexError for what is out of order."""
        arenas = self._arenas
        if (self.number < 0) != isinstance(message, protocol.Attach):
            raise ValueError(f"{type(message).__name__} out of order")
        match message:
            case protocol.Attach():
                arenas.attached(self, message)
            case protocol.Chunks():
                arenas.made(self, message)
            case protocol.Keep():
                arenas.kept(self, message)
            case protocol.Take():
                arenas.taken(self, message.number)
            case protocol.Park():
                arenas.parked(self, message)
            case protocol.Timed():
                arenas.timed(self, message)
            case protocol.Staged():
                if arenas.on_staged is not None:
                    arenas.on_staged(self.model, self.number, message)

    def _lost(self, why: str) -> None:
        if why:
            _log.error("event=rank_refused model=%s rank=%d why=%s", self.model, self.number, why)
        self._arenas.lost(self)


def _allow_files() -> None:
    """A descriptor stands for every chunk."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
