"""What pydantic finds wrong with somebody's document, as the one line that its author gets.

Models say what is allowed: a validator of ours raises a ValueError whose text completes "allowed: ...".
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from talaria.errors import InputError

M = TypeVar("M", bound=BaseModel)

LONGEST_VALUE = 60
"""Characters of a value that an error repeats."""


PLAIN = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "too_short": "at least {min_length} item",
    "string_too_short": "at least {min_length} character",
}
"""What pydantic words in terms of Python, by the type of its finding."""


def parse(model: type[M], value: Any, where: str) -> M:
    """``value`` as ``model``. Raises InputError at ``where`` for the first thing that is wrong with it."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _as_input_error(error, model, where) from None


def parse_json(model: type[M], text: str, where: str) -> M:
    """As ``parse``, from JSON text."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise _as_input_error(error, model, where) from None


def _as_input_error(error: ValidationError, model: type[BaseModel], where: str) -> InputError:
    """The field, its value, what is allowed and the nearest name, for the first violation.

    Of a missing field and an unknown one, the unknown one is told: it is most likely the other, misspelt.
    """
    found = error.errors(include_url=False)
    unknown = next((violation for violation in found if violation["type"] == "extra_forbidden"), found[0])
    first = unknown if found[0]["type"] == "missing" else found[0]
    kind, place, given = first["type"], first["loc"], first["input"]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".") or "document"
    if kind == "extra_forbidden":
        known = _fields_at(model, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]!r}?" if near else "remove it"
        return InputError(f"unknown field {field!r}", where=where, allowed=", ".join(known), fix=fix)
    if kind == "missing":
        return InputError(f"missing field {field!r}", where=where, fix="add it")
    if kind == "json_invalid":
        return InputError(first["msg"].replace("Invalid JSON:", "not JSON:"), where=where, allowed="one JSON value")
    if kind in ("model_type", "model_attributes_type"):
        inside = ", ".join(_fields_at(model, place))
        return InputError(f"{field} is not an object", where=where, allowed=f"an object with {inside}")
    allowed = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if kind in PLAIN:
        allowed = PLAIN[kind].format(**first.get("ctx", {}))
    if kind == "value_error" and isinstance(given, dict):  # a rule between its fields: the whole of it would say nothing
        return InputError(field, where=where, allowed=allowed)
    value = repr(given)
    shown = value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."
    return InputError(f"{field} = {shown}", where=where, allowed=allowed)


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Names that the model nested at ``place`` knows; indices and keys of mappings are passed over."""
    for part in place:
        info = next((field for name, field in model.model_fields.items() if part in (name, field.alias)), None)
        if info is not None:
            model = next(iter(_models_in(info.annotation)), model)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _models_in(inner)]
