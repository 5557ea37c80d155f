"""A policy file: the knobs (and optionally the config) that a tuning study, or a person, has settled on.

YAML or JSON: ``schema: talaria.policy/1``, ``config: NAME`` (optional), ``knobs: {tau: 2.0, ...}`` by command-line name and in the
units of ``talaria-sim knobs``, ``provenance: {...}`` (free, kept for people).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from talaria.cli.options import parse_knobs
from talaria.errors import InputError, unknown_name
from talaria.sim import config as configs
from talaria.yamlfile import read_mapping

SCHEMA = "talaria.policy/1"
FIELDS = ("schema", "config", "knobs", "provenance")


@dataclass(frozen=True, slots=True)
class Policy:
    """Knob values by command-line name, and the config they were found for (``None``: any)."""

    knobs: dict[str, object] = field(default_factory=dict)
    config: str | None = None


def load(path: Path) -> Policy:
    """Read and check a policy file. Raises InputError with the file, the field, the value and what is allowed."""
    document = read_mapping(path, FIELDS)
    where = str(path)
    for name in document:
        if name not in FIELDS:
            raise unknown_name("field", str(name), FIELDS, where=where)
    if document.get("schema") != SCHEMA:
        raise InputError(f"schema is {document.get('schema')!r}", where=where, allowed=SCHEMA)
    config = document.get("config")
    if config is not None:
        configs.get(config, where=f"{where}: config")
    knobs = document.get("knobs", {})
    if not isinstance(knobs, dict):
        raise InputError(f"knobs is {knobs!r:.60}", where=where, allowed="a mapping of knob names to values")
    return Policy(parse_knobs({str(name): value for name, value in knobs.items()}, where), config)
