"""What gateway and agent have in common as HTTP servers: how a client that goes away is told apart, how many there may be, and
what is not logged."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
from collections.abc import Iterator

import aiohttp
from aiohttp import http_exceptions, web
from aiohttp.abc import AbstractStreamWriter


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

    ``give`` writes one without a turn of the event loop, as aiohttp's own writing would take.
    """

    def __init__(self, request: web.BaseRequest, status: int, headers: dict[str, str]) -> None:
        self._request, self._protocol = request, request.protocol
        self._response = web.StreamResponse(status=status, headers=headers)
        self._chunked = request.version >= aiohttp.HttpVersion11
        """Else the end of the connection ends the answer."""
        if self._chunked:
            self._response.enable_chunked_encoding()
        else:
            self._response.force_close()
        self._writer: AbstractStreamWriter | None = None

    async def begin(self, data: bytes) -> None:
        """The head and the first bytes, at once. Raises ConnectionError where the client is gone, as do the others."""
        with client_may_go():
            self._writer = await self._response.prepare(self._request)
            await self._response.write(data)

    def give(self, data: bytes) -> bool:
        """Another chunk; whether more may follow before ``drained``."""
        protocol = self._protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client went away")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not protocol.writing_paused

    @property
    def full(self) -> bool:
        """Whether the client reads too slowly."""
        return self._protocol.writing_paused

    async def drained(self) -> None:
        """The client has read most of what there was."""
        assert self._writer is not None
        with client_may_go():
            await self._writer.drain()

    async def end(self) -> web.StreamResponse:
        with client_may_go():
            await self._response.write_eof()
        return self._response


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
