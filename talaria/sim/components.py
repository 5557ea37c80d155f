"""The switch component run: switches by each path, over and over, with a record of every rank (SPEC §5.4)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from talaria.profiles import Profile
from talaria.profiles import load as load_profile
from talaria.profiles.numbers import Factor, Seconds
from talaria.sim.memory import InstanceMemory
from talaria.sim.variation import SwitchVariation
from talaria.substrate.prefix import PrefixForest
from talaria.substrate.switch import SwitchRecord
from talaria.validation import parse
from talaria.workload.streams import stream
from talaria.yamlfile import read_mapping

FILE = Path(__file__).with_suffix(".yaml")
ASKED = ("d2d", "partial", "h2d")
_STAGED_WHOLE = 1.01  # of the time that staging takes
_STAGED_PARTLY = 0.95  # at most, so that something is left to load


class ComponentRun(BaseModel):
    """The run's settings. ``notes`` say what was inferred rather than published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["talaria.components/1"] = Field(alias="schema")
    profile: str
    models: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    repeats: Annotated[int, Field(ge=1, le=100_000)]
    """Switches into each model by each path."""
    partial_stage_s: Seconds
    """How long the target is staged before a partial switch, or until nearly all of it is."""
    link_load: Factor
    """H2D is so many times slower than in a quiet switch."""
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()


def load() -> ComponentRun:
    """The shipped run."""
    return parse(ComponentRun, read_mapping(FILE, tuple(ComponentRun.model_fields)), str(FILE))


def simulate_components(settings: ComponentRun, seed: int) -> dict[str, list[SwitchRecord]]:
    """Records of all ranks by the path that was asked for: with all of the target staged, a part of it, or nothing."""
    profile = load_profile(settings.profile, where="component run")
    return {path: _by_path(settings, profile, path, seed) for path in ASKED}


def _by_path(settings: ComponentRun, profile: Profile, path: str, seed: int) -> list[SwitchRecord]:
    hardware, models = profile.hardware, settings.models
    memory = InstanceMemory(profile, models, PrefixForest(), hkvr=True, swap=True)
    variation = SwitchVariation(hardware, lambda purpose: stream(seed, f"{purpose} of component run {path}"))
    for name in models:
        memory.open(name)
    memory.activate(models[0])
    now_s, source, records = 0.0, models[0], []
    for number in range(1, settings.repeats * len(models) + 1):
        target = models[number % len(models)]
        if path != "h2d":
            memory.stage(target, 1.0, now_s)
            whole_s = _STAGED_WHOLE * profile.model(target).weight_bytes / hardware.staging_bytes_per_s
            now_s += whole_s if path == "d2d" else min(settings.partial_stage_s, _STAGED_PARTLY * whole_s)
        cost = memory.plan_switch(source, target, [], 0.0, now_s)
        ranks = variation.ranks_s(cost._replace(load_s=cost.load_s * settings.link_load), hardware.tp)
        records += [SwitchRecord(phases_s, cost.path, cost.d2d_bytes, cost.h2d_bytes) for phases_s in ranks]
        now_s += max(sum(phases_s) for phases_s in ranks)
        memory.activate(target)
        source = target
    return records
