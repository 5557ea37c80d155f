"""The mirror knows what the engine's events say, loses nothing that can be had again, and never claims what is gone."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.kv.events import KvEvents
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.kv.mirror import KvMirror


def chain(tokens: int, page: int = 4) -> PageChain:
    return PageChain(page, array("I", range(tokens)).tobytes())


def stored(*hashes: int, medium: str | None = "GPU") -> dict[str, Any]:
    """As SGLang sends it, with fields that the mirror does not use."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": [], "block_size": 4,
        "lora_id": None, "medium": medium, "session_id": "s",
    }  # fmt: skip


def removed(*hashes: int, medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """SGLang's publisher: numbered batches on one socket, the last ones again on another."""

    def __init__(self, directory: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{directory}/events", f"ipc://{directory}/replay"
        self._context = zmq.asyncio.Context()
        self._publish = self._context.socket(zmq.XPUB)
        self._publish.bind(self.endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(self.replay_endpoint)
        self._number = 0
        self.kept: list[tuple[int, bytes]] = []
        self.replays = 0

    async def subscribed(self) -> None:
        await self._publish.recv()

    async def send(self, *events: dict[str, Any], lost: bool = False) -> None:
        body = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.kept.append((self._number, body))
        if not lost:
            await self._publish.send_multipart([b"kv", self._number.to_bytes(8, "big"), body])
        self._number += 1

    async def send_frames(self, *frames: bytes) -> None:
        await self._publish.send_multipart(list(frames))

    async def answer_replays(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.replays += 1
            for number, body in self.kept:
                if number >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart([client, b"", b"kv", number.to_bytes(8, "big"), body])
            await self._replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def follow(directory: Path, scene: Callable[[Publisher, KvMirror], Any]) -> KvMirror:
    async def main() -> KvMirror:
        publisher, mirror = Publisher(directory), KvMirror(4)
        events = KvEvents(publisher.endpoint, publisher.replay_endpoint, mirror)
        replays = asyncio.create_task(publisher.answer_replays())
        try:
            events.start()
            await publisher.subscribed()
            await scene(publisher, mirror)
        finally:
            replays.cancel()
            await events.stop()
            publisher.close()
        return mirror

    return asyncio.run(main())


def test_pages_come_and_go_with_the_events(tmp_path: Path) -> None:
    pages = chain(40).hashes

    async def scene(publisher: Publisher, mirror: KvMirror) -> None:
        await publisher.send(stored(*pages[:6]))
        await publisher.send(stored(*pages[6:], medium="CPU_PINNED"))
        await publisher.send(removed(*pages[5:6]), removed(*pages[:5], medium="CPU_PINNED"))
        await until(lambda: mirror.version == 2)
        assert mirror.device_tokens(chain(40)) == 20
        await publisher.send(CLEARED, stored(*pages[:2]))
        await until(lambda: mirror.version == 4)

    assert follow(tmp_path, scene).device_tokens(chain(40)) == 8


def test_lost_batches_are_asked_for_again(tmp_path: Path) -> None:
    pages = chain(40).hashes

    async def scene(publisher: Publisher, mirror: KvMirror) -> None:
        await publisher.send(stored(*pages[:2]), lost=True)
        await publisher.send(stored(*pages[2:4]))
        await publisher.send(stored(*pages[4:6]), lost=True)
        await publisher.send(removed(*pages[5:6]), lost=True)
        await publisher.send(stored(*pages[6:7]))
        await until(lambda: mirror.version == 5)
        assert 1 <= publisher.replays <= 2

    assert follow(tmp_path, scene).device_tokens(chain(40)) == 20


def test_what_cannot_be_had_again_empties_the_mirror(tmp_path: Path) -> None:
    pages = chain(40).hashes

    async def scene(publisher: Publisher, mirror: KvMirror) -> None:
        await publisher.send(stored(*pages[:5]))
        await until(lambda: len(mirror) == 5)
        await publisher.send(removed(*pages[:5]), lost=True)
        publisher.kept.clear()
        await publisher.send(stored(*pages[:1]))
        await until(lambda: len(mirror) == 1)

    assert follow(tmp_path, scene).device_tokens(chain(40)) == 4


def test_what_cannot_be_read_empties_the_mirror(tmp_path: Path) -> None:
    pages = chain(40).hashes

    async def scene(publisher: Publisher, mirror: KvMirror) -> None:
        await publisher.send(stored(*pages[:5]))
        await publisher.send({"type": "BlockMoved", "block_hashes": pages[:5]})
        await publisher.send(stored(*pages[:2]))
        await until(lambda: mirror.version == 3)

    assert follow(tmp_path, scene).device_tokens(chain(40)) == 8


def test_a_message_of_other_frames_is_survived(tmp_path: Path) -> None:
    pages = chain(40).hashes

    async def scene(publisher: Publisher, mirror: KvMirror) -> None:
        await publisher.send(stored(*pages[:5]))
        await publisher.send_frames(b"kv", b"what is this")
        await publisher.send(stored(*pages[:2]))
        await until(lambda: mirror.version == 3)

    assert follow(tmp_path, scene).device_tokens(chain(40)) == 8


def test_after_our_flush_events_from_before_it_count_for_nothing() -> None:
    mirror, pages = KvMirror(4), chain(40).hashes
    mirror.stored(pages)
    mirror.flushed()
    mirror.stored(pages[:4])  # sent before the flush, read after it
    assert len(mirror) == 0
    mirror.cleared()  # the engine goes on, and says what it did when
    mirror.stored(pages[:2])
    assert mirror.device_tokens(chain(40)) == 8


@given(present=st.integers(0, 12), tokens=st.integers(0, 50), page=st.sampled_from([1, 4, 16]))
def test_at_least_the_last_token_is_always_computed(present: int, tokens: int, page: int) -> None:
    prompt, mirror = chain(tokens, page), KvMirror(page)
    mirror.stored(prompt.hashes[:present])
    assert mirror.device_tokens(prompt) == max(0, min(present * page, (tokens - 1) // page * page))


@given(st.sets(st.integers(0, 9)))
def test_only_an_unbroken_chain_counts(present: set[int]) -> None:
    mirror, prompt = KvMirror(4), chain(41)
    mirror.stored(prompt.hashes[at] for at in present)
    assert mirror.device_tokens(prompt) == 4 * next(at for at in range(11) if at not in present)
