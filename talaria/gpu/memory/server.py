"""The agent's end of its engines' memory: the pool, its books, and a connection for each rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.memory.cpu import MemoryFile
from talaria.gpu.memory.peer import Peer
from talaria.gpu.memory.slabs import SLAB_BYTES
from talaria.gpu.memory.store import HostStore, Seat
from talaria.gpu.protocol import memory as protocol

_log = logging.getLogger(__name__)


class MemoryServer:
    """A host pool of ``pool_bytes`` for ``ranks`` ranks of any number of models. Memory is taken from the machine as it is first used.

    ``lost(model)``: a rank's connection has ended, and its process lives on.
    """

    def __init__(
        self, pool_bytes: int, ranks: int, slab_bytes: int = SLAB_BYTES, clock: Callable[[], float] = time.monotonic,
        lost: Callable[[str], None] = lambda model: None,
    ) -> None:  # fmt: skip
        slabs = pool_bytes // ranks // slab_bytes
        self.store = HostStore(slabs, slab_bytes, ranks)
        self.path: Path | None = None
        self._clock, self._lost = clock, lost
        self._names: dict[str, str] = {}
        """Of a served model in the registry, as its engine said when it last started."""
        self._pool = MemoryFile.make("talaria-host-kv", slabs * slab_bytes * ranks)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Raises OSError."""
        self._server = await asyncio.start_unix_server(self._accepted, str(path))
        path.chmod(0o600)
        self.path = path

    async def stop(self) -> None:
        """With every connection; the pool is gone with its last user."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._pool.close()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The task is ours: of one of its own, asyncio takes a cancellation for a fault."""
        task = asyncio.get_running_loop().create_task(self._connected(reader, writer))
        self._connections.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._connections.discard(task)
            writer.close()

        task.add_done_callback(ended)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.closing(self._invited(writer)) as peer:
                await self._served(reader, writer, peer)
        except OSError as error:
            _log.error("event=rank_lost why=%r", error)

    def _invited(self, writer: asyncio.StreamWriter) -> Peer:
        """Sends the descriptor of the pool, before anything is written: what the transport sends comes after it. Raises OSError."""
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as own:
            peer = Peer(own)
            try:
                socket.send_fds(own, [b"\0"], [self._pool.descriptor])
            except BaseException:
                peer.close()
                raise
        return peer

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        """One rank, from its first message until nothing of it can touch the pool any more."""
        seat: Seat | None = None
        model = ""
        try:
            join = await _receive(reader)
            if not isinstance(join, protocol.Join):
                raise ValueError(f"{type(join).__name__} before Join")
            model = join.model
            seat = self._seat(join, writer)
            while seat is not None:
                self._take(seat, await _receive(reader), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # whatever it said that makes no sense, the others go on
            _log.error("event=rank_refused model=%s why=%r", model, error)
        if seat is not None:
            self.store.leave(seat)
            writer.close()
            await peer.gone(lambda: self._lost(model))
            self.store.gone(seat)

    def cached_tokens(self, model: str, prompt: PageChain, from_tokens: int) -> int:
        """Where a prefix ends that the device has up to ``from_tokens`` and the host continues, before the prompt's last token."""
        name, page_tokens = self._names.get(model), prompt.page_tokens
        if name is None:
            return from_tokens
        pages = self.store.restorable(name, prompt.hashes, from_tokens // page_tokens)
        return max(from_tokens, min(pages, (prompt.tokens - 1) // page_tokens) * page_tokens)

    def _seat(self, join: protocol.Join, writer: asyncio.StreamWriter) -> Seat | None:
        """None: it is refused, and knows why."""
        try:
            if join.ranks != self.store.ranks:
                raise ValueError(f"{join.ranks} ranks, the pool has {self.store.ranks}")
            name = self._names[join.model] = registry_name(join)
            seat = self.store.join(name, join.rank, join.page_bytes, join.family, join.checkpoint_pages)
        except ValueError as error:
            writer.write(protocol.frame(protocol.Refused(str(error))))
            return None
        writer.write(protocol.frame(protocol.Welcome(self.store.slab_bytes, self.store.pool.total)))
        return seat

    def _take(self, seat: Seat, message: protocol.FromRank, writer: asyncio.StreamWriter) -> None:
        store = self.store
        if isinstance(message, protocol.Find):
            pages, slabs = store.find(seat, message.request, protocol.split(message.digests))
            writer.write(protocol.frame(protocol.Found(message.number, pages, array("I", slabs).tobytes())))
        elif isinstance(message, protocol.Save):
            grant = store.save(seat, message.number, protocol.split(message.digests), self._clock())
            granted, places = array("I", grant.pages).tobytes(), array("I", grant.slabs).tobytes()
            writer.write(protocol.frame(protocol.Granted(message.number, granted, places, grant.kept)))
        elif isinstance(message, protocol.Saved):
            store.saved(seat, message.number, complete=message.complete)
        elif isinstance(message, protocol.Pin):
            store.pin(seat, message.request, message.pages)
        elif isinstance(message, protocol.Done):
            store.done(seat, message.request, complete=message.complete)
        elif isinstance(message, protocol.Drain):
            store.drain(seat)
            writer.write(protocol.frame(protocol.Drained(message.number)))
        else:
            raise ValueError(f"{type(message).__name__} of a rank that has joined")


def registry_name(join: protocol.Join) -> str:
    """What makes two pages of equal hash interchangeable, rank for rank."""
    return "/".join(
        str(part)
        for part in (
            join.model, join.revision, join.dtype, join.page_tokens, join.ranks, join.family, join.layers, join.page_bytes,
            join.checkpoint_pages,
        )
    )  # fmt: skip


_decoder: Final = msgspec.msgpack.Decoder(protocol.FromRank)


async def _receive(reader: asyncio.StreamReader) -> protocol.FromRank:
    """Raises IncompleteReadError at the end, and ValueError or MsgspecError on what is not a message."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > protocol.LONGEST_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return _decoder.decode(await reader.readexactly(length))
