"""A rank whose agent hangs, is gone or says nonsense: it ends with one line and waits for nothing."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from talaria.gpu.memory import tenant as module
from talaria.gpu.memory.gather import NOTHING, Ledger
from talaria.gpu.memory.tenant import Tenant
from talaria.gpu.protocol import arena as protocol

PATIENCE_S = 60.0
LEDGER = Ledger("b", {chunk: chunk for chunk in range(4096)})


@contextmanager
def agent(path: Path) -> Iterator[socket.socket]:
    """What listens there."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(path))
        listener.listen()
        yield listener


@contextmanager
def tenant_of(
    listener: socket.socket, stage: Callable[[protocol.Stage, int | None], None] = lambda message, descriptor: None
) -> Iterator[tuple[Tenant, socket.socket]]:
    """A rank that is to make an arena, and its agent's end of the connection, from which nothing is read."""
    connections = []

    def welcome() -> None:
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE_S)
        connection.sendall(protocol.frame(protocol.Welcome(8, 4096, made=False, check=False, image_bytes=0)))
        connections.append(connection)

    welcoming = threading.Thread(target=welcome)
    welcoming.start()
    tenant = Tenant(listener.getsockname(), protocol.Attach(os.getpid(), 0, 1, "a"), stage)
    welcoming.join()
    with connections[0] as connection:
        yield tenant, connection
        tenant.close()


def is_hung_up(connection: socket.socket) -> bool:
    while connection.recv(1 << 20):
        pass
    return True


def no_longer_speaks(tenant: Tenant) -> None:
    for say in (lambda: tenant.park(NOTHING, 0.0), tenant.take, lambda: tenant.keep(0, 1), lambda: tenant.made(iter([os.dup(0)]))):
        with pytest.raises(OSError, match=r"^the agent that keeps the arena is gone"):
            say()


def test_an_agent_that_reads_nothing_is_hung_up_on(tmp_path: Path) -> None:
    with agent(tmp_path / "arena") as listener, tenant_of(listener) as (tenant, connection):
        tenant._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
        with pytest.raises(OSError, match=r"^the agent that keeps the arena does not read what it is told$"):
            for _ in range(1000):
                tenant.park(LEDGER, 0.0)
        no_longer_speaks(tenant)
        assert is_hung_up(connection)


def test_who_waits_for_the_arena_hears_that_another_thread_has_hung_up(tmp_path: Path) -> None:
    with agent(tmp_path / "arena") as listener, tenant_of(listener) as (tenant, connection):
        refused = []

        def take() -> None:
            with pytest.raises(OSError, match="is gone") as error:
                tenant.take()
            refused.append(str(error.value))

        taking = threading.Thread(target=take)
        taking.start()
        assert connection.recv(1, socket.MSG_PEEK)  # it has asked
        tenant._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
        with pytest.raises(OSError, match="does not read"):
            for _ in range(100_000):
                tenant.tell(protocol.Staged("b", 1, 1, 0, 0, 1, 0.1))
        taking.join(PATIENCE_S)
        assert refused == ["the agent that keeps the arena is gone"]


def test_the_arena_is_given_while_an_image_is_still_made_ready_and_its_wish_is_void_then(tmp_path: Path) -> None:
    begun, ended, seen = threading.Event(), threading.Event(), list[str]()

    def pins(message: protocol.Stage, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)
        begun.set()
        assert ended.wait(PATIENCE_S)
        seen.append(message.model)

    with agent(tmp_path / "arena") as listener, tenant_of(listener, pins) as (tenant, connection):
        for model in ("b", "c"):
            socket.send_fds(connection, [protocol.frame(protocol.Stage(model, 64, 1.0))], [listener.fileno()])
        assert begun.wait(PATIENCE_S)
        for number in (1, 2):
            connection.sendall(protocol.frame(protocol.Taken(number, {3: 5}, 7)))
            assert tenant.take() == Ledger("", {3: 5}, 7) and seen == []
        connection.sendall(protocol.frame(protocol.Stage("d", 0, 1.0)))
        connection.sendall(protocol.frame(protocol.Taken(3, {}, 0)))
        tenant.take()
        ended.set()
    assert seen == ["b", "c", "", "d"], "void but once, and nothing that was not wished for"


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", protocol.frame(protocol.Stage("b", 5, 1.0)), protocol.frame(protocol.Stage("", 0, 0.0))],
    ids=["no frame", "no descriptor", "a wish that fails"],
)  # fmt: skip
def test_what_cannot_be_understood_or_done_ends_the_connection(tmp_path: Path, data: bytes) -> None:
    def fails(message: protocol.Stage, descriptor: int | None) -> None:
        raise RuntimeError("a fault of ours")

    with agent(tmp_path / "arena") as listener, tenant_of(listener, fails) as (tenant, connection):
        connection.sendall(data)
        assert is_hung_up(connection)
        no_longer_speaks(tenant)


def test_an_agent_that_does_not_answer_a_new_rank_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    with agent(tmp_path / "arena"), pytest.raises(OSError, match=r"^the agent that keeps the arena does not answer$"):
        Tenant(str(tmp_path / "arena"), protocol.Attach(os.getpid(), 0, 1, "a"), lambda message, descriptor: None)
