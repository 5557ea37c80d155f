"""Finds and reads profiles: shipped ones by name, one's own by path. Anything wrong becomes one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from talaria.errors import InputError, unknown_name
from talaria.profiles.profile import Profile, resolve
from talaria.profiles.schema import ProfileFile
from talaria.validation import parse

DATA = Path(__file__).parent / "data"


def names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


def load(name_or_path: str, *, where: str = "") -> Profile:
    """The shipped profile of that name, or the profile file at that path; ``where`` is the option or file that named it.

    Raises InputError naming the file and field if the file is missing, unreadable, not JSON or violates the schema, and
    the nearest shipped name if there is none such.
    """
    if name_or_path in names():
        return read(DATA / f"{name_or_path}.json")
    if "/" in name_or_path or name_or_path.endswith(".json"):
        return read(Path(name_or_path))
    raise unknown_name("profile", name_or_path, names(), where=where)


def read(path: Path) -> Profile:
    """The profile in the JSON file at ``path``; errors as for ``load``."""
    return resolve(parse(ProfileFile, read_json(path), str(path)))


def read_json(path: Path) -> Any:
    """The JSON document at ``path``. Raises InputError if it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"cannot read: {reason}", where=str(path), fix="give the path of a JSON file") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not JSON: {error.msg}"
        raise InputError(what, where=f"{path}:{error.lineno}", allowed="one JSON document") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where=str(path), allowed="one JSON document") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
