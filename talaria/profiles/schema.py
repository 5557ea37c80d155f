"""The profile file, ``talaria.profile/1`` (JSON): every number is a quantity with its provenance and source.

The two number tables mirror ``HardwareNumbers`` and ``ModelNumbers`` field by field, so a number without provenance
cannot be written down.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from talaria.profiles.numbers import Family, HardwareNumbers, ModelNumbers

Provenance = Literal["measured", "published", "fitted", "assumed"]
Curve = Literal["prefill", "decode", "recompute"]
T = TypeVar("T")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantity(Strict, Generic[T]):
    """One number; its unit is in the name of the field that holds it."""

    model_config = ConfigDict(strict=True)

    value: T
    provenance: Provenance
    source: str = Field(min_length=1)


class FitSummary(Strict):
    """How well one curve met its points, as relative errors, and where those points lay (inclusive)."""

    points: int = Field(ge=1)
    median_error: float = Field(ge=0)
    max_error: float = Field(ge=0)
    worst: str
    """Coordinates of the worst point."""
    ranges: dict[str, tuple[float, float]]
    """Axis → smallest and largest value among the points. Axes: ``tokens`` (of the whole prompt) and ``cached`` of prefill,
    ``batch`` and ``context`` (of each sequence) of decode, ``tokens`` of recompute."""
    left_out: str = ""
    """Which points of the source were left out, and why."""


def _quantities(name: str, numbers: type) -> type[BaseModel]:
    """The file's counterpart of a dataclass of numbers: the same fields, numbers wrapped, defaults kept as absent."""
    hints = get_type_hints(numbers, include_extras=True)
    quantity: Any = Quantity  # subscripted below with types that are only known at run time
    columns: dict[str, Any] = {}
    for field in fields(numbers):
        hint = hints[field.name]
        wrapped = hint if hint in (str, Family) else quantity[hint]
        columns[field.name] = (wrapped, ...) if field.default is MISSING else (wrapped | None, None)
    return create_model(name, __base__=Strict, **columns)


HardwareQuantities = _quantities("HardwareQuantities", HardwareNumbers)
ModelQuantities = _quantities("ModelQuantities", ModelNumbers)


class ProfileFile(Strict):
    """A whole profile as it stands on disk."""

    schema_: Literal["talaria.profile/1"] = Field(alias="schema")
    name: str = Field(min_length=1)
    description: str = Field(min_length=1)
    gpu: str = Field(min_length=1)
    hardware: HardwareQuantities  # type: ignore[valid-type]
    models: dict[str, ModelQuantities] = Field(min_length=1)  # type: ignore[valid-type]
    fits: dict[str, dict[Curve, FitSummary]] = Field(default_factory=dict)
    """By model: how the curves that were fitted to points met them."""

    @model_validator(mode="after")
    def _fits_are_of_models(self) -> ProfileFile:
        for name in self.fits:
            if name not in self.models:
                raise ValueError(f"fits only of the profile's models, not of {name!r}")
        return self

    def document(self) -> dict[str, Any]:
        """The JSON document, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def text(self) -> str:
        """What stands in the file."""
        return json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n"
