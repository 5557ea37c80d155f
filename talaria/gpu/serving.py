"""What gateway and agent have in common as HTTP servers: how a client that goes away is told apart, how many there may be, and
what is not logged."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator

import aiohttp
from aiohttp import http_exceptions


@contextlib.contextmanager
def client_may_go() -> Iterator[None]:
    """Around writing to a client. Raises a plain ConnectionError where it is gone: aiohttp's own is a ClientError too, as if what we
    read from had broken off."""
    try:
        yield
    except aiohttp.ClientConnectionResetError as error:
        raise ConnectionResetError(str(error)) from None


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
