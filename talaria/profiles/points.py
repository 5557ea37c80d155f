"""Measured latency points, the input of a fit.

Two documents are read. ``talaria.points/1`` names a base profile, or brings all hardware and model quantities itself, and
holds the points of each model. A document of ``entries`` as aiconfigurator-core writes them is the other; its rows have
the same form: a prefill row says that a prompt of ``tokens``, of which ``cached`` were on the device, took ``ms``; a
decode row that one step of ``batch`` sequences with ``context`` tokens each took ``ms``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from talaria.errors import InputError, unknown_name
from talaria.profiles.load import load, read_json
from talaria.profiles.numbers import Count, CountOrNone
from talaria.profiles.schema import Strict
from talaria.validation import parse

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PrefillPoint(Strict):
    model_config = ConfigDict(strict=True)

    tokens: Count
    cached: CountOrNone
    ms: Milliseconds

    @model_validator(mode="after")
    def _something_is_new(self) -> PrefillPoint:
        if self.cached >= self.tokens:
            raise ValueError(f"cached below tokens, which is {self.tokens}")
        return self


class DecodePoint(Strict):
    model_config = ConfigDict(strict=True)

    batch: Count
    context: CountOrNone
    ms: Milliseconds


class ModelPoints(Strict):
    """The points of one model. ``numbers`` holds quantities that add to or replace those of the base profile's model."""

    prefill: tuple[PrefillPoint, ...] = Field(min_length=4)
    decode: tuple[DecodePoint, ...] = Field(min_length=4)
    reliable_context: Count | None = None
    """Decode points beyond this context are left out of the fit; ``note`` says why."""
    note: str = ""
    numbers: dict[str, Any] = Field(default_factory=dict)


class PointsFile(Strict):
    """``talaria.points/1``: what to fit, and the profile it completes."""

    schema_: Literal["talaria.points/1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    description: str = Field(min_length=1)
    source: str = Field(min_length=1)
    """Where the points come from: tool, version, date."""
    base: str | None = None
    """Profile, by name or path, that gives every quantity not given here."""
    gpu: str | None = None
    hardware: dict[str, Any] = Field(default_factory=dict)
    models: dict[str, ModelPoints] = Field(min_length=1)


class Entry(BaseModel):
    """One model on one system, as aiconfigurator-core reports it; fields that a fit does not need pass unread."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    system: str
    model: str
    unit: Literal["ms"]
    prefill: tuple[PrefillPoint, ...] = Field(min_length=4)
    decode: tuple[DecodePoint, ...] = Field(min_length=4)


class Entries(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    source: str = Field(min_length=1)
    entries: tuple[Entry, ...] = Field(min_length=1)


def read_points(path: Path, *, system: str | None = None, base: str | None = None) -> PointsFile:
    """The points in the file at ``path``, in either form.

    ``system`` picks one of the systems of a document of entries; it may be left out where there is only one. ``base``
    replaces the file's own base profile; for entries it defaults to the shipped profile named like the system.
    Raises InputError naming file and field.
    """
    document = read_json(path)
    if isinstance(document, dict) and "entries" in document:
        return _from_entries(read_entries(path), path, system, base)
    if system is not None:
        raise InputError(f"--system {system}: the file has points of one system", where=str(path), fix="leave --system out")
    points = parse(PointsFile, document, str(path))
    return points.model_copy(update={"base": base}) if base else points


def read_entries(path: Path) -> Entries:
    """The document of aiconfigurator-like entries at ``path``. Raises InputError naming file and field."""
    return parse(Entries, read_json(path), str(path))


def _from_entries(document: Entries, path: Path, system: str | None, base: str | None) -> PointsFile:
    """One system's entries as points over a base profile, whose models they match by hub id."""
    systems = sorted({entry.system for entry in document.entries})
    if system is None and len(systems) > 1:
        raise InputError(
            "several systems in one file", where=str(path), allowed=", ".join(systems), fix=f"choose one, as in --system {systems[0]}"
        )
    system = system or systems[0]
    if system not in systems:
        raise unknown_name("system", system, systems, where=f"{path} --system")
    base = base or system.split("_")[0]
    profile = load(base)
    by_hub_id = {model.hub_id: name for name, model in profile.models.items()}
    models = {}
    for entry in document.entries:
        if entry.system != system:
            continue
        if entry.model not in by_hub_id:
            raise unknown_name(f"model (by hub id, in base profile {base})", entry.model, by_hub_id, where=str(path))
        models[by_hub_id[entry.model]] = ModelPoints(prefill=entry.prefill, decode=entry.decode)
    description = f"Fit of the {system} entries in {path.name} over {base}."
    return PointsFile(schema="talaria.points/1", name=system, description=description, source=document.source, base=base, models=models)
