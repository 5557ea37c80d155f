"""Profiles that a schema accepts and physics does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from talaria.profiles import Profile, load, names
from talaria.profiles.check import check
from talaria.profiles.profile import resolve
from talaria.profiles.schema import ProfileFile
from talaria.validation import parse

HYBRID = "Qwen3.5-122B-A10B"


def changed(values: dict[str, Any]) -> Profile:
    """``paper-tp8`` with some numbers changed: ``hardware.x`` or, of its hybrid model, ``x``."""
    document = copy.deepcopy(load("paper-tp8").file.document())
    for field, value in values.items():
        table, _, name = field.rpartition(".")
        numbers = document["hardware"] if table else document["models"][HYBRID]
        numbers[name] = {"value": value, "provenance": "assumed", "source": "test"}
    return resolve(parse(ProfileFile, document, "test"))


@pytest.mark.parametrize("name", names())
def test_a_shipped_profile_has_no_errors(name: str) -> None:
    assert [finding for finding in check(load(name)) if finding.level == "error"] == []


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("hardware.d2d_bytes_per_s", 30e9, "hardware.d2d_bytes_per_s"),
        ("hardware.staging_bytes_per_s", 40e9, "hardware.staging_bytes_per_s"),
        ("hardware.restore_bytes_per_s", 40e9, "hardware.restore_bytes_per_s"),
        ("hardware.device_cap_bytes", 200 * 1024**3, "hardware.device_cap_bytes"),
        ("hardware.bump_fraction", 0.95, "hardware.bump_fraction"),
        ("tp", 16, f"models.{HYBRID}.tp"),
        ("weight_bytes", 160_000_000_000, f"models.{HYBRID}.weight_bytes"),
        ("state_bytes", 0, f"models.{HYBRID}.state_bytes"),
        ("checkpoint_tokens", 0, f"models.{HYBRID}.checkpoint_tokens"),
        ("open_s", 0.1, f"models.{HYBRID}.open_s"),
    ],
)
def test_numbers_that_contradict_physics_are_errors(field: str, value: float, where: str) -> None:
    assert where in [finding.where for finding in check(changed({field: value})) if finding.level == "error"]


def test_a_lost_prefix_that_costs_the_same_at_any_length_is_an_error() -> None:
    profile = changed({"recompute_base_s": 1.0, "recompute_s_per_token": 0.0})
    assert f"models.{HYBRID}.recompute_s_per_token" in [finding.where for finding in check(profile) if finding.level == "error"]


def test_work_that_takes_no_time_is_an_error() -> None:
    profile = changed({"decode_base_s": 0.0, "decode_s_per_sequence": 0.0, "decode_s_per_context_token": 0.0})
    assert [finding.where for finding in check(profile) if finding.level == "error"] == [f"models.{HYBRID}.decode_base_s"]


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("hardware.host_weight_bytes", 10**11, "hardware.host_weight_bytes"),
        ("hardware.residue_bytes", 16 * 1024**3, "hardware.residue_bytes"),
        ("kv_bytes_per_token", 10**6, f"models.{HYBRID}.context_limit_tokens"),
    ],
)
def test_what_limits_the_use_of_a_profile_is_a_warning(field: str, value: float, where: str) -> None:
    assert where in [finding.where for finding in check(changed({field: value})) if finding.level == "warning"]


def test_a_curve_that_misses_its_points_is_a_warning() -> None:
    said = {finding.where: finding.message for finding in check(load("b200"))}
    assert "misses a point by 43%" in said["fits.GLM-5-nvfp4.prefill"]
    assert "fits.Qwen3-32B.prefill" not in said


def test_decode_that_looks_extrapolated_at_its_source_is_left_out_and_said() -> None:
    profile = load("b200")
    assert profile.file.fits["Qwen3.5-35B-A3B"]["decode"].ranges["context"][1] <= 32_768
    said = [finding.message for finding in check(profile) if finding.where == "fits.Qwen3.5-35B-A3B.decode"]
    assert any("left out" in message and "32,768" in message for message in said)
