"""What the commands on studies share: where a study lives, and what is said when that place is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from talaria.cli.console import note

INTERRUPTED = 130

StorageOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Where the study lives: sqlite:///FILE, postgresql://..., journal:FILE, grpc://HOST:PORT.")
]


@contextmanager
def kept_storage(url: str) -> Iterator[Any]:
    """The storage at ``url`` for the time of a study. If it goes away on the way, that is one line and exit code 1."""
    from talaria.tune.storage import StorageLost, opened, redacted

    try:
        with opened(url) as storage:
            yield storage
    except StorageLost as error:
        note(f"error: {redacted(url)}: {error}; what is finished is kept, the same command goes on")
        raise typer.Exit(1) from None
