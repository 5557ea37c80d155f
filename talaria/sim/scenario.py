"""Scenarios: an experiment without its system. Which instances, which models, which work, and how it arrives.

A scenario is a YAML file; the shipped ones lie in ``talaria/sim/scenarios``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from talaria.errors import InputError, unknown_name

_SHIPPED = Path(__file__).parent / "scenarios"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InstanceGroup(_Strict):
    """``count`` equal TP groups."""

    count: int = Field(default=1, ge=1, le=4096)
    pool: Literal["cold", "hot"] = "cold"
    profile: str | None = None
    """Another profile than the scenario's."""
    models: tuple[str, ...] | None = None
    """What this group may run; a hot group pins the first. Default: all models of the scenario."""
    opened: tuple[str, ...] | None = None
    """Models open at the start; default: as many as may be resident, in order, rotated from instance to instance."""
    max_resident_models: int = Field(default=8, ge=1)
    max_running: int = Field(default=256, ge=1)
    inflight_kv: Literal["swap", "recompute"] = "swap"


class BeliefError(_Strict):
    """A deliberate error of the policy's initial profile: its belief is truth times these factors."""

    prefill: float = Field(default=1.0, gt=0, le=10)
    decode: float = Field(default=1.0, gt=0, le=10)
    restore: float = Field(default=1.0, gt=0, le=10)
    switch: float = Field(default=1.0, gt=0, le=10)


class Telemetry(_Strict):
    """How snapshots travel: published when a slot opens and every ``heartbeat_s``, seen ``delay_s`` later."""

    delay_s: float = Field(default=0.005, ge=0)
    min_interval_s: float = Field(default=0.5, ge=0)
    """Slots that open sooner after the last snapshot wait for the heartbeat."""
    heartbeat_s: float = Field(default=2.0, gt=0)


class Scenario(_Strict):
    """One experiment, complete but for configuration and seed."""

    schema_: Literal["talaria.scenario/1"] = Field(alias="schema")
    name: str
    about: str
    profile: str
    models: tuple[str, ...] = Field(min_length=1)
    instances: tuple[InstanceGroup, ...] = Field(min_length=1)
    workload: dict[str, Any]
    """``preset`` (and its overrides) or ``trace`` (a path); see ``workload/open.py``."""
    gap_cap_s: float | None = Field(default=None, gt=0)
    """Recorded gaps are capped at this in the replay."""
    arrivals: str = "closed_pool:5"
    knobs: dict[str, Any] = Field(default_factory=dict)
    """Knob values that belong to the experiment; the command line wins over them."""
    open_s: float | None = Field(default=None, gt=0)
    """Seconds of a full open here, in place of the profile's (which reads the checkpoint from disk)."""
    warmup_s: float = Field(default=0.0, ge=0)
    """Calls enqueued before this are left out of every metric."""
    noise: bool = True
    """Seeded variation of ground-truth durations, by the profile's coefficients."""
    belief_error: BeliefError = BeliefError()
    telemetry: Telemetry = Telemetry()
    notes: tuple[str, ...] = ()
    """What was inferred rather than published."""

    @model_validator(mode="after")
    def _names_agree(self) -> Scenario:
        for group in self.instances:
            for name in (*(group.models or ()), *(group.opened or ())):
                if name not in self.models:
                    raise ValueError(f"instances name model {name!r}, which the scenario does not list")
        return self


_SECTIONS: dict[str, type[_Strict]] = {"instances": InstanceGroup, "belief_error": BeliefError, "telemetry": Telemetry}


def names() -> list[str]:
    """Shipped scenarios."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def load(source: str) -> Scenario:
    """A shipped scenario by name, or one from a file (anything with a slash or a .yaml ending).

    Raises InputError that names the file, the field and what is allowed.
    """
    is_file = "/" in source or source.endswith((".yaml", ".yml"))
    path = Path(source) if is_file else _SHIPPED / f"{source}.yaml"
    if not is_file and not path.exists():
        raise unknown_name("scenario", source, names(), where="--scenario")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path), fix="check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"not a YAML file: {error}", where=str(path)) from None
    if not isinstance(document, dict):
        raise InputError("a scenario is a YAML mapping", where=str(path), allowed="see docs/scenarios.md")
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise _explain(error, document, path) from None


def _explain(error: ValidationError, document: dict[str, Any], path: Path) -> InputError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    where = f"{path}: {place}" if place else str(path)
    if first["type"] == "extra_forbidden":
        section = _SECTIONS.get(str(first["loc"][0]), Scenario) if len(first["loc"]) > 1 else Scenario
        known = sorted(field.alias or name for name, field in section.model_fields.items())
        return unknown_name("field", str(first["loc"][-1]), known, where=where)
    given = first.get("input")
    shown = "" if isinstance(given, (dict, list)) else f" (got {given!r})"
    return InputError(f"{first['msg']}{shown}", where=where)
