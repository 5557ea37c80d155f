"""What is no gateway of ours, or half of one, is one clear line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest

from talaria.errors import InputError
from talaria.gpu.run import local
from talaria.gpu.run.client import Client, Endpoint
from talaria.gpu.run.kept import INPUTS, Kept
from talaria.gpu.stopping import stop_event


@contextmanager
def saying(body: bytes) -> Iterator[str]:
    """The URL of a server that answers everything with the line ``body``."""
    body += b"\n"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


async def ask(url: str, what: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
        client = Client(http, Endpoint(url))
        if what == "models":
            await client.models()
        elif what == "vocabulary":
            await client.vocabulary("m")
        else:
            async with client.records() as stream:
                async for _ in stream:
                    pass


@pytest.mark.parametrize("what", ["models", "vocabulary", "records"])
@pytest.mark.parametrize(
    "body", [b'{"object": "list"}', b"[1]", b"null", b'{"data": [{"name": 1}], "choices": [7]}', b"<html>", b'{"choices": []}']
)
def test_an_answer_that_is_no_gateways_is_bad_input(what: str, body: bytes) -> None:
    with saying(body) as url, pytest.raises(InputError, match=url):
        asyncio.run(ask(url, what))


def test_records_that_do_not_come_in_time_are_bad_input() -> None:
    class Late:
        async def get(self, *_: Any, **__: Any) -> None:
            raise TimeoutError

    async def read() -> None:
        async with Client(Late(), Endpoint("http://g")).records():  # type: ignore[arg-type]
            pass

    with pytest.raises(InputError, match="no answer in time"):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("body", "ready"),
    [(b"<html>", False), (b"{}", False), (b"[]", False), (b'{"instances": {"a": false}}', False), (b'{"instances": {"a": true}}', True)],
)
def test_only_a_gateway_is_ready(body: bytes, ready: bool) -> None:
    with saying(body) as url:
        assert local._is_ready(url) is ready


def test_a_log_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="log_dir"):
        local._opened(tmp_path / "file" / "gateway.log")


def test_a_damaged_keep_is_not_gone_on_with(tmp_path: Path) -> None:
    Kept(tmp_path / "kept", {"a": 1}, resume=False)
    Kept(tmp_path / "kept", {"a": 1}, resume=True)
    (tmp_path / "kept" / INPUTS).write_bytes(b"\xff{")
    with pytest.raises(InputError, match="without --resume"):
        Kept(tmp_path / "kept", {"a": 1}, resume=True)
    (tmp_path / "kept" / INPUTS).unlink()
    with pytest.raises(InputError, match="damaged"):
        Kept(tmp_path / "kept", {"a": 1}, resume=True)


def test_a_file_has_no_end_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> None:
        stop_event(at_eof=True)

    with open(os.devnull) as nothing, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", nothing)
        with pytest.raises(InputError, match="--until-eof"):
            asyncio.run(wait())
