"""Follows one engine's KV events (ZeroMQ) into its mirror."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from talaria.gpu.kv.mirror import KvMirror

_log = logging.getLogger(__name__)
_REPLAY_S: Final = 5.0
_FRAMES: Final = 3
"""Topic, number, batch; a replay has an empty one before them."""
_END: Final = (-1).to_bytes(8, "big", signed=True)
_DEVICE: Final = (None, "GPU")


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    at_s: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decoder: Final = msgspec.msgpack.Decoder(_Batch)


class KvEvents:
    """Subscribed from ``start`` to ``stop``. Start it before the engine, which numbers its batches from 0.

    A missed batch is asked for again; where the engine does not have it any more, the mirror starts over: it may then know less
    than the engine has, never more.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, mirror: KvMirror) -> None:
        self._mirror = mirror
        self._replay_endpoint = replay_endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._next = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != _FRAMES:  # if it was a batch, the number of the next one tells
                _log.warning("a KV event message has %d frames, not %d: the mirror starts over", len(frames), _FRAMES)
                self._mirror.cleared()
                continue
            _, sequence, body = frames
            number = int.from_bytes(sequence, "big")
            if number > self._next:
                await self._replay()
            if number > self._next:
                _log.warning("KV events %d to %d are lost: the mirror starts over", self._next, number - 1)
                self._mirror.cleared()
                self._next = number
            self._take(number, body)

    async def _replay(self) -> None:
        """Take all batches from the next one on that the engine still has; none where it does not answer in time."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            async with asyncio.timeout(_REPLAY_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) != 1 + _FRAMES:
                        _log.warning("the engine replays a KV event message of %d frames, not %d", len(frames), 1 + _FRAMES)
                        return
                    _, _, sequence, body = frames
                    if sequence == _END:
                        return
                    number = int.from_bytes(sequence, "big")
                    if number > self._next:
                        return
                    self._take(number, body)
        except TimeoutError:
            _log.warning("the engine does not replay KV events")
        finally:
            socket.close(linger=0)

    def _take(self, number: int, body: bytes) -> None:
        """Apply a batch, unless a replay has brought it already."""
        if number < self._next:
            return
        self._next = number + 1
        try:
            events = _decoder.decode(body).events
        except msgspec.MsgspecError as error:  # it may have said that pages are gone
            _log.warning("KV events %d cannot be read, so the mirror starts over: %s", number, error)
            self._mirror.cleared()
            return
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._mirror.cleared()
            elif event.medium in _DEVICE:
                (self._mirror.stored if isinstance(event, BlockStored) else self._mirror.removed)(event.block_hashes)
