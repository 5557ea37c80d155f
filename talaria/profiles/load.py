"""Finds and reads profiles: shipped ones by name, one's own by path. Anything wrong becomes one clear line."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from talaria.errors import InputError, unknown_name
from talaria.profiles.profile import Profile, resolve
from talaria.profiles.schema import ProfileFile

DATA = Path(__file__).parent / "data"


def names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


def load(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the profile file at that path.

    Raises InputError naming the file and field if the file is missing, unreadable, not JSON or violates the schema, and
    the nearest shipped name if there is none such.
    """
    if name_or_path in names():
        return read(DATA / f"{name_or_path}.json")
    if "/" in name_or_path or name_or_path.endswith(".json"):
        return read(Path(name_or_path))
    raise unknown_name("profile", name_or_path, names())


def read(path: Path) -> Profile:
    """The profile in the JSON file at ``path``; errors as for ``load``."""
    return resolve(parse(read_json(path), where=str(path)))


def read_json(path: Path) -> Any:
    """The JSON document at ``path``. Raises InputError if it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"cannot read: {reason}", where=str(path), fix="give the path of a JSON file") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = "the file is empty" if not text.strip() else f"not JSON: {error.msg}"
        raise InputError(what, where=f"{path}:{error.lineno}", allowed="one JSON document") from None


def parse(document: Any, *, where: str) -> ProfileFile:
    """A validated profile file. Raises InputError for the first violation, naming ``where`` and the field."""
    try:
        return ProfileFile.model_validate(document)
    except ValidationError as error:
        raise input_error(error, ProfileFile, where) from None


def input_error(error: ValidationError, model: type[BaseModel], where: str) -> InputError:
    """One violation that pydantic found as one line: file, field, value, what is allowed, nearest name.

    It is the first one, unless that is a missing field and another is unknown: then one is the other, misspelt.
    """
    found = error.errors()
    unknown = next((violation for violation in found if violation["type"] == "extra_forbidden"), found[0])
    first = unknown if found[0]["type"] == "missing" else found[0]
    location = [str(part) for part in first["loc"]]
    field = ".".join(location) or "document"
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]!r}?" if near else "remove it"
        return InputError(f"unknown field {field!r}", where=where, allowed=", ".join(known), fix=fix)
    if first["type"] == "missing":
        return InputError(f"field {field!r} is missing", where=where, fix="add it")
    if first["type"] == "model_type":
        inside = ", ".join(_fields_at(model, location))
        return InputError(f"{field} is not an object", where=where, allowed=f"an object with {inside}")
    given = first["input"]
    shown = f" = {given!r}" if isinstance(given, str | int | float | bool) else ""
    return InputError(f"{field}{shown}", where=where, allowed=first["msg"].removeprefix("Input should be ").removeprefix("Value error, "))


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    """Names that the model nested at ``location`` knows; keys of a mapping are passed over."""
    for part in location:
        info = next((field for name, field in model.model_fields.items() if part in (name, field.alias)), None)
        if info is not None:
            model = next((inner for inner in _models_in(info.annotation)), model)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _models_in(inner)]
