"""What a schema cannot see in a profile: numbers that contradict each other or physics, and curves used beyond their points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from talaria.profiles.numbers import HardwareNumbers, ModelNumbers
from talaria.profiles.profile import Profile

MISFIT = 0.25
"""Largest relative error of a fitted curve that passes without a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``error``: the profile cannot be right. ``warning``: it can be used, knowing this."""

    level: Literal["error", "warning"]
    where: str
    """Field, as in the file."""
    message: str


def check(profile: Profile) -> list[Finding]:
    """Everything doubtful about ``profile``, errors first."""
    findings = [*_hardware(profile.hardware), *_together(profile)]
    for name in profile.models:
        findings += [*_model(profile, name), *_curves(profile, name)]
    return sorted(findings, key=lambda finding: finding.level)


def _hardware(hardware: HardwareNumbers) -> Iterator[Finding]:
    if hardware.device_cap_bytes > hardware.hbm_bytes:
        yield Finding("error", "hardware.device_cap_bytes", "is more than hbm_bytes")
    if hardware.bump_bytes + hardware.residue_bytes > hardware.device_cap_bytes:
        yield Finding("error", "hardware.bump_fraction", "leaves no room for even one model's residue below device_cap_bytes")
    if hardware.d2d_bytes_per_s <= hardware.h2d_bytes_per_s:
        yield Finding("error", "hardware.d2d_bytes_per_s", "is not above h2d_bytes_per_s: staging would never pay")
    for name in ("staging_bytes_per_s", "restore_bytes_per_s"):
        if getattr(hardware, name) > hardware.h2d_bytes_per_s:
            yield Finding("error", f"hardware.{name}", "is above h2d_bytes_per_s, though it uses the same link")


def _together(profile: Profile) -> Iterator[Finding]:
    """Whether all models fit one group's host memory and GPUs at the same time."""
    hardware = profile.hardware
    images = sum(model.total_weight_bytes for model in profile.models.values())
    if images > hardware.host_weight_bytes:
        yield Finding("warning", "hardware.host_weight_bytes", f"holds {hardware.host_weight_bytes:,} of the models' {images:,} bytes")
    room = (hardware.device_cap_bytes - hardware.bump_bytes) // hardware.residue_bytes
    if room < len(profile.models):
        yield Finding("warning", "hardware.residue_bytes", f"lets {room} of {len(profile.models)} models be open at a time")


def _model(profile: Profile, name: str) -> Iterator[Finding]:
    model, hardware, where = profile.models[name], profile.hardware, f"models.{name}"
    if model.tp > hardware.tp:
        yield Finding("error", f"{where}.tp", f"is {model.tp} on a group of {hardware.tp}")
    kv_room = hardware.bump_bytes - hardware.runtime_bytes - model.weight_bytes
    if kv_room <= 0:
        yield Finding("error", f"{where}.weight_bytes", "and runtime_bytes do not fit the managed buffer")
    elif kv_room < model.kv_bytes_per_token * model.context_limit_tokens:
        tokens = kv_room // model.kv_bytes_per_token
        yield Finding("warning", f"{where}.context_limit_tokens", f"is more than the {tokens:,} tokens of KV that fit beside the weights")
    yield from _family(model, where)
    timing = profile.timing(name)
    if timing.step_s(1, 1) <= 0 or timing.prefill_s(1, 0) <= 0:
        yield Finding("error", f"{where}.decode_base_s", "and the other coefficients give work that takes no time")
    if timing.open_s < timing.h2d_switch_s:
        yield Finding("error", f"{where}.open_s", "is below the H2D switch that an open contains")
    if model.recompute_base_s > 0 and model.recompute_s_per_token == 0:
        yield Finding("error", f"{where}.recompute_s_per_token", "is missing beside recompute_base_s")


def _family(model: ModelNumbers, where: str) -> Iterator[Finding]:
    recurrent = model.family == "recurrent"
    for name, value in (("state_bytes", model.state_bytes), ("checkpoint_tokens", model.checkpoint_tokens)):
        if recurrent != (value > 0):
            yield Finding("error", f"{where}.{name}", f"must be {'above zero' if recurrent else 'zero'} for family {model.family}")


def _curves(profile: Profile, name: str) -> Iterator[Finding]:
    for curve, summary in profile.file.fits.get(name, {}).items():
        where = f"fits.{name}.{curve}"
        if summary.max_error > MISFIT:
            message = f"misses a point by {summary.max_error:.0%} (median {summary.median_error:.0%}): {summary.worst}"
            yield Finding("warning", where, message)
        if summary.left_out:
            yield Finding("warning", where, summary.left_out)
    limit = profile.models[name].context_limit_tokens
    for message in profile.beyond_evidence(name, prompt_tokens=limit, batch=1):
        yield Finding("warning", f"models.{name}.context_limit_tokens", message)
