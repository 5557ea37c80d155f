"""What gateway and agent have in common as HTTP servers: how a client that goes away is told apart, how many there may be, and
what is not logged."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import http_exceptions, web

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
"""Engines and what stands before them may answer with a status that has none."""


@contextlib.contextmanager
def client_may_go() -> Iterator[None]:
    """Around writing to a client. Raises a plain ConnectionError where it is gone: aiohttp's own is a ClientError too, as if what we
    read from had broken off."""
    try:
        yield
    except aiohttp.ClientConnectionResetError as error:
        raise ConnectionResetError(str(error)) from None


class Stream:
    """A streamed answer, in chunks where its client knows them.

    Head, chunks and end are written without aiohttp, whose own way takes several times as long and turns of the event loop: the first
    chunk waits for the head in gateway and agent.
    """

    def __init__(self, request: web.BaseRequest, status: int, headers: Mapping[str, str]) -> None:
        self._request, self._protocol = request, request.protocol
        self._chunked = request.version >= aiohttp.HttpVersion11
        """Else the end of the connection ends the answer."""
        keep = self._chunked and request.keep_alive
        self._response = _Written(keep)
        said = {**headers, "date": _date(int(time.time()))}
        said |= {"transfer-encoding": "chunked"} if self._chunked else {}
        said |= {} if keep else {"connection": "close"}
        lines = [f"HTTP/1.{int(self._chunked)} {status} {_PHRASES.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in said.items()]
        self._head = "\r\n".join(lines).encode() + b"\r\n\r\n"

    def begin(self, data: bytes) -> None:
        """The head and the first bytes, at once. Raises ConnectionError where the client is gone, as do the others."""
        self._write(self._head + self._chunk(data))
        self._request.writer.output_size += len(data)  # so that aiohttp does not put an error of its own behind it

    def give(self, data: bytes) -> bool:
        """Another chunk; whether more may follow before ``drained``."""
        self._write(self._chunk(data))
        return not self._protocol.writing_paused

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _write(self, data: bytes) -> None:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client went away")
        transport.write(data)

    @property
    def full(self) -> bool:
        """Whether the client reads too slowly."""
        return self._protocol.writing_paused

    async def drained(self) -> None:
        """The client has read most of what there was."""
        with client_may_go():
            await self._request.writer.drain()

    def end(self) -> web.StreamResponse:
        if self._chunked:
            self._write(b"0\r\n\r\n")
        return self._response


class _Written(web.StreamResponse):
    """What aiohttp is handed of an answer that has been written."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self._keep = keep

    @property
    def keep_alive(self) -> bool:
        return self._keep

    async def prepare(self, request: web.BaseRequest) -> None:
        pass

    async def write_eof(self, data: bytes = b"") -> None:
        pass


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def spare_collections() -> None:
    """What there is once a process is up stays: the collector need not look at it again, nor after every few hundred objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def allow_many_connections() -> None:
    """Every call holds two connections of the gateway and two of its agent: take all that the system allows, not its usual 1,024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def log_no_contents() -> None:
    """What is no HTTP is logged by the name of what is wrong: aiohttp would repeat the bytes, which may be a key or a prompt."""
    logging.getLogger("aiohttp.server").addFilter(_without_contents)


def _without_contents(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, http_exceptions.HttpProcessingError):
        record.msg, record.args = "event=no_http why=%s", (type(error).__name__,)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
