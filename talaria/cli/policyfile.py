"""A policy file: the knobs (and optionally the config) that a tuning study, or a person, has settled on.

YAML or JSON: ``schema: talaria.policy/1``, ``config: NAME`` (optional), ``knobs: {tau: 2.0, ...}`` by command-line name and in the
units of ``talaria-sim knobs``, ``provenance: {...}`` (free, kept for people).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria.cli.options import parse_knobs
from talaria.errors import InputError, unknown_name

SCHEMA = "talaria.policy/1"
FIELDS = ("schema", "config", "knobs", "provenance")


@dataclass(frozen=True, slots=True)
class Policy:
    """Knob values by command-line name, and the config they were found for (``None``: any)."""

    knobs: dict[str, object]
    config: str | None = None


def load(path: Path) -> Policy:
    """Read and check a policy file. Raises InputError with the file, the field, the value and what is allowed."""
    document = _parse(path)
    where = str(path)
    for name in document:
        if name not in FIELDS:
            raise unknown_name("field", str(name), FIELDS, where=where)
    if document.get("schema") != SCHEMA:
        raise InputError(f"schema is {document.get('schema')!r}", where=where, allowed=SCHEMA)
    config = document.get("config")
    if config is not None and not isinstance(config, str):
        raise InputError(f"config is {config!r}", where=where, allowed="a name from `talaria-sim configs`")
    knobs = document.get("knobs", {})
    if not isinstance(knobs, dict):
        raise InputError(f"knobs is {knobs!r:.60}", where=where, allowed="a mapping of knob names to values")
    return Policy(parse_knobs({str(name): value for name, value in knobs.items()}, where), config)


def _parse(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), allowed="a YAML or JSON file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"is no YAML: {getattr(error, 'problem', error)}", where=where, allowed="YAML or JSON") from None
    if not isinstance(document, dict):
        found = "empty" if document is None else f"a {type(document).__name__}"
        raise InputError(f"is {found}", where=str(path), allowed=f"a mapping with {', '.join(FIELDS)}")
    return document
