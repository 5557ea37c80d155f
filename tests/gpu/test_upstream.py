"""``talaria.gpu.upstream`` against a server that says exactly what it is told to, split wherever it likes."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from talaria.gpu.upstream import Reply, Upstream, UpstreamFailed

TEST_S = 120.0
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\n\r\n"
)


class Server:
    """Answers every request with ``parts``, one write each; ``connections`` counts those that came."""

    def __init__(self, parts: list[bytes], *, close: bool = False) -> None:
        self.parts, self.close, self.connections, self.url = parts, close, 0, ""
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for part in self.parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[Upstream]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    upstream = Upstream(idle_s=600.0, connect_s=60.0)
    try:
        async with listener:
            yield upstream
            upstream.close()
    finally:
        upstream.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TEST_S))


async def ask(upstream: Upstream, server: Server, read: Callable[[Reply], Coroutine[Any, Any, bytes]] = Reply.read) -> tuple[Reply, bytes]:
    reply = Reply()
    await upstream.post(reply, server.url, "/v1/x", {"x-name": "value"}, b"body")
    return reply, await read(reply)


async def passed(reply: Reply) -> bytes:
    """As ``pass_to`` hands it over, to a reader who is full after every piece."""
    got, waits = [], []

    def take(data: bytes) -> bool:
        got.append(data)
        return False

    async def drained() -> None:
        waits.append(len(got))
        await asyncio.sleep(0)

    await reply.pass_to(take, drained)
    assert len(waits) == len(got)
    return b"".join(got)


@pytest.mark.parametrize("read", [Reply.read, passed])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED, b"hello, world"),
        (CHUNKED.replace(b"0\r\n\r\n", b"0\r\nx-trailer: y\r\n\r\n"), b"hello, world"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_an_answer_is_read_wherever_it_is_split_and_its_connection_is_kept(
    answer: bytes, body: bytes, read: Callable[[Reply], Coroutine[Any, Any, bytes]]
) -> None:
    async def test() -> None:
        server = Server([])
        async with served(server) as upstream:
            for cut in range(0, len(answer), 3):
                server.parts = [answer[:cut], answer[cut : cut + 1], answer[cut + 1 :]]
                reply, got = await ask(upstream, server, read)
                assert got == body and reply.complete
            assert server.connections == 1
            assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\n") and server.requests[0].endswith(b"\r\n\r\nbody")

    run(test())


def test_bytes_one_by_one() -> None:
    async def test() -> None:
        server = Server([bytes([byte]) for byte in CHUNKED])
        async with served(server) as upstream:
            reply, got = await ask(upstream, server)
            assert got == b"hello, world" and reply.is_stream

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED[:-1],
        CHUNKED[:-20],
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"",
        b"not HTTP at all\r\n\r\n",
        CHUNKED.replace(b"7;x=y", b"-7"),
        CHUNKED.replace(b"hello", b"hell"),
        CHUNKED.replace(b"ed\r\n", b"ed, gzip\r\n"),
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello, world",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_2\r\n\r\nhello, world",
        b"HTTP/1.1 000 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
def test_an_answer_that_breaks_off_or_makes_no_sense_may_have_arrived(answer: bytes) -> None:
    async def test() -> None:
        server = Server([answer], close=True)
        async with served(server) as upstream:
            with pytest.raises(UpstreamFailed) as failed:
                await ask(upstream, server)
            assert failed.value.arrived

    run(test())


def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def test() -> None:
        server = Server([b"HTTP/1.0 200 OK\r\n\r\n", b"hello"], close=True)
        async with served(server) as upstream:
            assert (await ask(upstream, server))[1] == b"hello"

    run(test())


def test_a_connection_that_was_closed_or_is_not_to_be_kept_is_not_used_again() -> None:
    async def test() -> None:
        server = Server([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"])
        async with served(server) as upstream:
            for _ in range(3):
                assert (await ask(upstream, server))[1] == b"ok"
            assert server.connections == 3

    run(test())


def test_nobody_there_is_no_arrival() -> None:
    async def test() -> None:
        server = Server([])
        async with served(server):
            pass
        upstream = Upstream(idle_s=60.0, connect_s=5.0)
        with pytest.raises(UpstreamFailed) as failed:
            await ask(upstream, server)
        assert not failed.value.arrived

    run(test())


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_calls_that_are_given_up_at_any_moment_leave_no_connection_behind(runs: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def test() -> None:
        server = Server([CHUNKED])
        async with served(server) as upstream:
            for turns in range(40):
                asking = asyncio.create_task(ask(upstream, server))
                for _ in range(turns % 20):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                upstream.close()
            while upstream._open:
                await asyncio.sleep(0.001)

    runs(asyncio.wait_for(test(), TEST_S))


def test_closing_ends_whoever_waits() -> None:
    async def test() -> None:
        server = Server([CHUNKED[:-20]])
        async with served(server) as upstream:
            reply = Reply()
            await upstream.post(reply, server.url, "/", {}, b"")
            reading = asyncio.create_task(reply.read())
            await asyncio.sleep(0)
            reply.close()
            with pytest.raises(UpstreamFailed):
                await reading

    run(test())


def test_what_a_reader_raises_ends_the_passing() -> None:
    async def test() -> None:
        server = Server([CHUNKED[:-20], CHUNKED[-20:]])

        def gone(data: bytes) -> bool:
            raise ConnectionResetError

        async def drained() -> None:
            raise AssertionError

        async with served(server) as upstream:
            reply = Reply()
            await upstream.post(reply, server.url, "/", {}, b"")
            with pytest.raises(ConnectionResetError):
                await reply.pass_to(gone, drained)
            reply.close()

    run(test())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    made = tmp_path_factory.mktemp("tls")
    certificate, key = made / "certificate.pem", made / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=agent", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=TEST_S,
    )  # fmt: skip
    return certificate, key


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_agent_behind_tls_is_answered_if_its_certificate_is_trusted(
    runs: Callable[[Coroutine[Any, Any, None]], None], certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)

    async def check() -> None:
        server = Server([CHUNKED])
        async with served(server, tls) as upstream:
            with pytest.raises(UpstreamFailed, match=r"cannot be reached.*certificate") as caught:
                await ask(upstream, server)
            assert not caught.value.arrived and not server.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        async with served(server, tls) as upstream:
            for _ in range(2):
                assert (await ask(upstream, server))[1] == b"hello, world"
        assert len(server.requests) == 2 and server.connections == 1, "the refused one never got through, the other was kept"

    runs(asyncio.wait_for(check(), TEST_S))
