"""Reading files that users bring: text or gzip, JSON lines, one JSON document or CSV, and the types of their fields.

Everything that can be wrong with such a file ends as an ``InputError`` that names file and line.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from talaria.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
MAX_TOKENS = 100_000_000
MAX_SECONDS = 1e10
"""About 300 years: wide enough for Unix time, narrow enough that milliseconds taken for seconds are caught."""

Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
PositiveTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, Field(ge=0.0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, Field(ge=0.0, le=1000.0 * MAX_SECONDS)]
IsoTime = Annotated[float, BeforeValidator(lambda value: iso_seconds(value)), Field(ge=0.0, le=MAX_SECONDS)]
"""Seconds since 1970 of an ISO 8601 text; UTC where it names no zone."""
Chars = Annotated[int, Field(ge=0, le=4 * MAX_TOKENS)]
Name = Annotated[str, Field(min_length=1)]
BlockHash = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def iso_seconds(value: Any) -> float:
    """Raises ValueError if ``value`` is no ISO 8601 text."""
    if not isinstance(value, str):
        raise ValueError("an ISO 8601 time")
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("an ISO 8601 time") from None


class CsvRecord(BaseModel):
    """A row of a CSV file: as ``Record``, but numbers are written as text."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


class Record(BaseModel):
    """A record of somebody else's file: fields that we do not use are ignored, those that we use are strict."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank, of a plain or gzip file.

    Raises InputError if the file is missing, unreadable, not UTF-8, truncated or has no line with content.
    """
    number = 0
    empty = True
    try:
        with _opened(path) as file:
            for raw in file:
                number += 1
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if "\0" in text:
                    raise InputError("binary data where text is expected", where=f"{path}:{number}", allowed="UTF-8 text or gzip of it")
                if text.strip():
                    empty = False
                    yield number, text
    except UnicodeDecodeError as error:
        at = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise InputError(at, where=f"{path}:{number}", allowed="UTF-8 text or gzip of it") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"damaged or truncated gzip ({error})", where=f"{path}:{number + 1}", fix="copy or download the file again"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror or error}", where=str(path), fix="give a readable file") from None
    if empty:
        raise InputError("the file is empty", where=str(path), fix="give a trace with at least one record")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with path.open("rb") as file:
        if file.peek(2)[:2] == GZIP_MAGIC:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        else:
            yield file


def _decoded(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _not_json(error: Exception, path: Path, line: int) -> InputError:
    if isinstance(error, json.JSONDecodeError):
        line += error.lineno - 1
        return InputError(f"not JSON: {error.msg} at column {error.colno}", where=f"{path}:{line}", allowed="JSON")
    return InputError(f"not JSON: {error}", where=f"{path}:{line}", allowed="JSON")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and value of every JSON record: one per line, or one document (a top-level list counts by item).

    A file whose first line is not a complete JSON value is read as one document.
    """
    lines = text_lines(path)
    number, first = next(lines)
    try:
        value = _decoded(first)
    except json.JSONDecodeError as error:
        if error.pos < len(first.rstrip()):
            raise _not_json(error, path, number) from None
        yield from _items(path, number, _document(path, number, [first, *(text for _, text in lines)]))
        return
    except (ValueError, RecursionError) as error:
        raise _not_json(error, path, number) from None
    yield from _items(path, number, value)
    for number, text in lines:
        try:
            value = _decoded(text)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, path, number) from None
        yield f"{path}:{number}", value


def csv_records(path: Path, required: Iterable[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Place and fields of every row of a CSV file with a header; blank fields are None.

    Raises InputError if a column of ``required`` is missing, or a row is not as long as the header.
    """
    lines = text_lines(path)
    number, first = next(lines)
    names = _csv_fields(first, f"{path}:{number}")
    if missing := [name for name in required if name not in names]:
        raise InputError(f"no column {missing[0]!r}", where=f"{path}:{number}", allowed=", ".join(required))
    for number, text in lines:
        where = f"{path}:{number}"
        fields = _csv_fields(text, where)
        if len(fields) != len(names):
            raise InputError(f"{len(fields)} fields", where=where, allowed=f"{len(names)}, as in the header")
        yield where, {name: field.strip() or None for name, field in zip(names, fields, strict=True)}


def _csv_fields(text: str, where: str) -> list[str]:
    try:
        return next(csv.reader([text]))
    except csv.Error as error:
        raise InputError(f"not CSV: {error}", where=where, allowed="fields separated by commas, as in the header") from None


def _document(path: Path, first_line: int, lines: list[str]) -> Any:
    try:
        return _decoded("\n".join(lines))
    except (ValueError, RecursionError) as error:
        raise _not_json(error, path, first_line) from None


def _items(path: Path, line: int, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, list):
        yield f"{path}:{line}", value
        return
    if not value:
        raise InputError("the list of records is empty", where=f"{path}:{line}", fix="give a trace with at least one record")
    for index, item in enumerate(value):
        yield f"{path}:{line} item {index}", item
