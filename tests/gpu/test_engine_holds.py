"""The agent's end of the hold socket: messages arrive whole and in order, and a lost or unreadable connection is said once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.protocol.engine import ABI, LONGEST_FRAME_BYTES, Ended, FromEngine, Grant, Held, Hello, Progress, ToEngine, frame

HELLO = Hello(ABI, "big", 7, 16, 1000, 8, 4096)


class Ears:
    def __init__(self) -> None:
        self.heard: list[tuple[str, FromEngine]] = []
        self.lost: list[str] = []


def run(directory: Path, scene: Callable[[HoldServer, Ears], Awaitable[None]]) -> Ears:
    async def main() -> Ears:
        ears = Ears()
        server = HoldServer(lambda model, message: ears.heard.append((model, message)), ears.lost.append)
        await server.start(directory / "holds")
        try:
            async with asyncio.timeout(120):
                await scene(server, ears)
        finally:
            await server.stop()
        return ears

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def connect(server: HoldServer, *messages: FromEngine) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.writelines(map(frame, messages))
    return reader, writer


def test_messages_arrive_in_order_however_they_are_cut(tmp_path: Path) -> None:
    sent = [HELLO, Held("a", bytes(4000), 5), *(Progress("a", n) for n in range(50)), Ended("a", "grant", 50, b"\1\0\0\0", 0)]

    async def scene(server: HoldServer, ears: Ears) -> None:
        _, writer = await connect(server)
        data, cut = b"".join(map(frame, sent)), random.Random(1)
        while data:
            size = cut.randrange(1, 300)
            writer.write(data[:size])
            await writer.drain()
            await asyncio.sleep(0)
            data = data[size:]
        await until(lambda: len(ears.heard) == len(sent))
        writer.close()

    ears = run(tmp_path, scene)
    assert ears.heard == [("big", message) for message in sent]


def test_the_agent_hears_of_a_loss_once_and_of_the_next_greeting(tmp_path: Path) -> None:
    async def scene(server: HoldServer, ears: Ears) -> None:
        _, writer = await connect(server, HELLO)
        assert await server.hello("big") == HELLO
        writer.close()
        await until(lambda: ears.lost == ["big"])
        waiting = asyncio.create_task(server.hello("big"))
        again = msgspec.structs.replace(HELLO, pid=8)
        _, writer = await connect(server, again)
        assert await waiting == again
        writer.close()
        await until(lambda: ears.lost == ["big", "big"])

    run(tmp_path, scene)


def test_a_new_connection_of_a_model_replaces_the_old_one(tmp_path: Path) -> None:
    async def scene(server: HoldServer, ears: Ears) -> None:
        old, old_writer = await connect(server, HELLO)
        await server.hello("big")
        new, new_writer = await connect(server, msgspec.structs.replace(HELLO, pid=8))
        assert await old.read() == b""
        await until(lambda: len(ears.heard) == 2)
        assert ears.lost == ["big"]
        server.send("big", Grant("a", 3))
        size = int.from_bytes(await new.readexactly(4), "big")
        assert msgspec.msgpack.decode(await new.readexactly(size), type=ToEngine) == Grant("a", 3)
        old_writer.close()
        new_writer.close()

    run(tmp_path, scene)


def test_what_cannot_be_read_ends_the_connection(tmp_path: Path) -> None:
    too_long = (LONGEST_FRAME_BYTES + 1).to_bytes(4, "big")
    junk = (5).to_bytes(4, "big") + b"\xc1junk"

    async def scene(server: HoldServer, ears: Ears) -> None:
        for greeted, bad in ((False, frame(Progress("a", 1))), (False, junk), (True, junk), (True, too_long), (True, frame(HELLO))):
            reader, writer = await connect(server, *([HELLO] if greeted else []))
            writer.write(bad)
            assert await reader.read() == b""
            writer.close()
        await until(lambda: len(ears.lost) == 3)

    ears = run(tmp_path, scene)
    assert ears.heard == [("big", HELLO)] * 3


def test_a_message_to_a_model_without_connection_is_dropped(tmp_path: Path) -> None:
    async def scene(server: HoldServer, ears: Ears) -> None:
        server.send("big", Grant("a", 1))

    run(tmp_path, scene)
