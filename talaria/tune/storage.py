"""Where studies live: any RDB that SQLAlchemy reaches, a journal file, or a gRPC proxy in front of one. Chosen by URL."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from talaria.errors import InputError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage

IN_MEMORY, JOURNAL, GRPC = "memory:", "journal:", "grpc://"
FORMS = "sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE, another SQLAlchemy URL, journal:FILE, grpc://HOST:PORT"
INSTALL = "in a checkout: pip install '.[tune]' for PostgreSQL and gRPC; other drivers by their own name"
NO_FILE = ("sqlite://", "sqlite:///", "sqlite:///:memory:")
CONNECT_S = 10
LOCKED_S = 120
"""How long a process waits for others that write to the same SQLite file."""
WHOLE_S = 1.0
"""How long another process may take to append to a journal."""
CREATIONS, IN_CREATION = 10, ("already exists", "unique", "duplicate", "locked", "deadlock")
"""Tries to open a database, and words of what goes wrong while another process is creating Optuna's tables in it."""
DRIVERS = {"postgresql://": "postgresql+psycopg://", "postgres://": "postgresql+psycopg://"}


class StorageLost(Exception):
    """The storage cannot be reached any more; what was told it is kept."""


def sqlite_url(path: Path) -> str:
    """The storage that is one file."""
    return f"sqlite:///{path}"


def redacted(url: str) -> str:
    """``url`` without its password."""
    scheme, slashes, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    if not at:
        return url
    user, colon, _ = credentials.partition(":")
    return f"{scheme}{slashes}{user}{':***' if colon else ''}@{place}"


@contextmanager
def opened(url: str) -> Iterator[BaseStorage]:
    """The storage at ``url`` for the time of the block; an SQLite file or journal that is not there is created.

    Raises InputError, in one line and without the password, if it cannot be reached, is none, or its driver is missing; and
    StorageLost where the block finds it gone.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    with ExitStack() as held:
        with _refused(url, _is_refusal), _quietly():
            storage = _open(url, held)
            storage.get_all_studies()  # damaged ones, and tables of somebody else's with Optuna's names, are found here
        try:
            yield storage
        except Exception as error:
            if not _is_loss(error):
                raise
            raise StorageLost(_reason(error)) from error


@contextmanager
def beginning(url: str) -> Iterator[None]:
    """Around what a study asks of its storage before any work. Raises InputError, as ``opened`` does, where it is not given: the
    place is read-only, or damaged."""
    with _refused(url, lambda error: isinstance(error, (OSError, json.JSONDecodeError)) or _is_loss(error)):
        yield


@contextmanager
def _refused(url: str, is_refusal: Callable[[Exception], bool]) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each driver has errors of its own
        if not is_refusal(error):
            raise
        fix = INSTALL if isinstance(error, ImportError) else ""
        raise InputError(f"cannot be used: {_reason(error)}", where=f"--storage {redacted(url)}", allowed=FORMS, fix=fix) from None


def _open(url: str, held: ExitStack) -> BaseStorage:
    if url == IN_MEMORY:  # for what nobody wants to keep; not offered as an option
        from optuna.storages import InMemoryStorage

        return InMemoryStorage()
    if url.startswith(JOURNAL):
        return _journal(url.removeprefix(JOURNAL))
    if url.startswith(GRPC):
        return _proxy(url.removeprefix(GRPC), held)
    return _database(url, held)


def _database(url: str, held: ExitStack) -> BaseStorage:
    from optuna.storages import get_storage

    if "://" not in url:
        raise InputError(f"{url!r} is no URL", where="--storage", allowed=FORMS, fix=f"for a file: sqlite:///{url or 'FILE'}")
    if url in NO_FILE:
        raise InputError("names no file: nothing would be kept", where=f"--storage {url}", allowed=FORMS)
    for given, driver in DRIVERS.items():
        url = driver + url.removeprefix(given) if url.startswith(given) else url
    arguments: dict[str, Any] = {"connect_timeout": CONNECT_S} if "postgresql" in url else {}
    if url.startswith("sqlite:///"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        arguments = {"timeout": LOCKED_S}
    database = _created(url, arguments)
    held.callback(database.engine.dispose)
    held.callback(database.remove_session)
    return get_storage(database)


def _created(url: str, arguments: dict[str, Any]) -> RDBStorage:
    """The database with Optuna's tables; processes that are started together all try to create them."""
    from optuna.storages import RDBStorage

    for turn in range(1, CREATIONS):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": arguments})
        except Exception as error:
            if not any(word in _reason(error).lower() for word in IN_CREATION):
                raise
            time.sleep(0.2 * turn)
    return RDBStorage(url, engine_kwargs={"connect_args": arguments})


def _journal(path: str) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not path:
        raise InputError("names no file", where="--storage journal:", allowed=FORMS)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).exists():  # Optuna would append to it first, to half a line too
        if not _is_journal(path):
            raise InputError("is no journal of Optuna's", where=f"--storage journal:{path}", fix="name a new file")
        until_s = time.monotonic() + WHOLE_S
        while not _is_whole(path):
            if time.monotonic() > until_s:
                raise InputError("ends in half a line", where=f"--storage journal:{path}", fix=f"take that line out: sed -i '$d' {path}")
            time.sleep(0.05)
    return JournalStorage(JournalFileBackend(path))


def _is_journal(path: str) -> bool:
    """Whether the first line of the file, if it has one, is an operation of Optuna's."""
    with open(path, "rb") as file:
        first = file.readline()
    try:
        return not first.strip() or "op_code" in json.loads(first)
    except (ValueError, TypeError):
        return False


def _is_whole(path: str) -> bool:
    """Whether the last line of the file, if it has one, was written to its end: a process may be killed, or the disk full, before."""
    with open(path, "rb") as file:
        last = b"".join(deque(file, maxlen=1))
    try:
        return not last or (last.endswith(b"\n") and bool(json.loads(last)))
    except ValueError:
        return False


def _proxy(address: str, held: ExitStack) -> BaseStorage:
    from optuna.storages import GrpcStorageProxy

    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 2**16):
        raise InputError(f"{address!r} is no address", where="--storage grpc://", allowed=FORMS)
    proxy = GrpcStorageProxy(host=host, port=int(port))
    held.callback(proxy.close)
    try:
        proxy.wait_server_ready(timeout=CONNECT_S)
    except ConnectionError:
        raise InputError(
            f"gives no answer in {CONNECT_S} s", where=f"--storage grpc://{address}", fix="start Optuna's gRPC storage proxy there"
        ) from None
    return proxy


@contextmanager
def _quietly() -> Iterator[None]:
    """Optuna calls the proxy and the retries experimental; that is said in our documentation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, (OSError, ImportError, RuntimeError, ValueError, KeyError, AssertionError)) or _is_loss(error)


def _is_loss(error: Exception) -> bool:
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, (StorageInternalError, SQLAlchemyError, ConnectionError)) or type(error).__module__.startswith("grpc")


def _reason(error: BaseException) -> str:
    """The first line of what went wrong; Optuna wraps the database's own words."""
    cause = error.__cause__ or error
    text = next((line.strip() for line in str(getattr(cause, "orig", None) or cause).splitlines() if line.strip()), "")
    return text or type(cause).__name__
