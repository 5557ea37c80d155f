"""Checks of run documents that come from files: a run directory may have been edited, truncated or written by others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from talaria.errors import InputError
from talaria.report.document import Document
from talaria.validation import parse_json

Number = Annotated[float, Field(allow_inf_nan=False)]


class Spread(BaseModel):
    """Standard deviation and 95 % interval over seeds; null with fewer than two seeds."""

    model_config = ConfigDict(extra="forbid")

    std: Number | None
    ci95: tuple[Number | None, Number | None]


class RunDocument(BaseModel):
    """``talaria.run/1`` as it lies in ``run.json``."""

    model_config = ConfigDict(extra="forbid")

    schema_: Literal["talaria.run/1"] = Field(alias="schema")
    scenario: str
    config: str
    policy: dict[str, Any]
    trace: dict[str, Any]
    seeds: list[int]
    metrics: dict[str, Number | None]
    spread: dict[str, Spread]
    per_seed: list[dict[str, Number | None]]
    provenance: dict[str, Any]


def read_run_document(path: Path) -> Document:
    """The run document in ``path``, checked. Raises InputError if it is unreadable, no JSON or not ``talaria.run/1``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        below = sorted(found.parent.name for found in path.parent.glob("*/run.json"))
        raise InputError(
            f"cannot be read ({_reason(error)})",
            where=str(path),
            allowed="a run.json that `talaria-sim run --out DIR` wrote",
            fix=f"name a run below it: {', '.join(below)}" if below else "",
        ) from None
    return parse_json(RunDocument, text, str(path)).model_dump(mode="json", by_alias=True)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
