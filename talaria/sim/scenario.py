"""Scenarios: an experiment without its system. Which instances, which models, which work, and how it arrives.

A scenario is a YAML file; the shipped ones lie in ``talaria/sim/scenarios``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from talaria.errors import InputError, unknown_name
from talaria.validation import parse
from talaria.workload.reading import Name, Seconds
from talaria.yamlfile import read_mapping

_SHIPPED = Path(__file__).parent / "scenarios"

PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Factor = Annotated[float, Field(ge=0.01, le=10)]
Models = Annotated[tuple[Name, ...], Field(strict=False)]
"""Strict otherwise; only a YAML list has to become a tuple."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class InstanceGroup(_Strict):
    """``count`` equal TP groups."""

    count: int = Field(default=1, ge=1, le=4096)
    pool: Literal["cold", "hot"] = "cold"
    profile: Name | None = None
    """Another profile than the scenario's."""
    models: Annotated[Models, Field(min_length=1)] | None = None
    """What this group may run; a hot group pins the first. Default: all models of the scenario."""
    opened: Models | None = None
    """Models open at the start; default: as many as may be resident, in order, rotated from instance to instance."""
    max_resident_models: Count = 8
    max_running: Count = 256
    inflight_kv: Literal["swap", "recompute"] = "swap"
    hkvr: bool = True
    """Whether these groups have a host KV registry, where the configuration wants one; likewise staging."""
    staging: bool = True


class BeliefError(_Strict):
    """A deliberate error of the policy's initial profile: its belief is truth times these factors."""

    prefill: Factor = 1.0
    decode: Factor = 1.0
    restore: Factor = 1.0
    switch: Factor = 1.0


class Telemetry(_Strict):
    """How snapshots travel: published when a slot opens and every ``heartbeat_s``, seen ``delay_s`` later."""

    delay_s: Seconds = 0.005
    min_interval_s: Seconds = 1.0
    """Slots that open sooner after the last snapshot wait for the heartbeat."""
    heartbeat_s: Annotated[Seconds, Field(ge=0.01)] = 4.0


class Scenario(_Strict):
    """One experiment, complete but for configuration and seed."""

    schema_: Literal["talaria.scenario/1"] = Field(alias="schema")
    name: Name
    about: str
    profile: Name
    models: Annotated[Models, Field(min_length=1)]
    instances: tuple[InstanceGroup, ...] = Field(min_length=1, strict=False)
    workload: dict[str, Any]
    """``preset`` (and its overrides) or ``trace`` (a path); see ``workload/open.py``."""
    gap_cap_s: PositiveSeconds | None = None
    """Recorded gaps are capped at this in the replay."""
    arrivals: str = "closed_pool:5"
    knobs: dict[str, Any] = Field(default_factory=dict)
    """Knob values that belong to the experiment; the command line wins over them."""
    open_s: PositiveSeconds | None = None
    """Seconds of a full open here, in place of the profile's (which reads the checkpoint from disk)."""
    warmup_s: Seconds = 0.0
    """Calls enqueued before this are left out of every metric."""
    noise: bool = True
    """Seeded variation of ground-truth durations, by the profile's coefficients."""
    belief_error: BeliefError = BeliefError()
    telemetry: Telemetry = Telemetry()
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What was inferred rather than published."""


_FIELDS = tuple(sorted(field.alias or name for name, field in Scenario.model_fields.items()))


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
    scenario = parse(Scenario, read_mapping(path, _FIELDS), str(path))
    _check_models(scenario, str(path))
    return scenario


def _check_models(scenario: Scenario, where: str) -> None:
    """Groups run models of the scenario, and open models that they run; no list names one twice."""
    lists = [("models", scenario.models, scenario.models)]
    for number, group in enumerate(scenario.instances):
        runs = group.models or scenario.models
        lists += [(f"instances[{number}].models", runs, scenario.models), (f"instances[{number}].opened", group.opened or (), runs)]
    for field, given, known in lists:
        for index, name in enumerate(given):
            if name not in known:
                raise unknown_name("model", name, known, where=f"{where}: {field}")
            if name in given[:index]:
                raise InputError(f"model {name!r} is given twice", where=f"{where}: {field}", allowed="each model once")
