"""The fit finds the coefficients that made its points, never a negative one, and reports what it cannot follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.profiles.build import build
from talaria.errors import InputError
from talaria.profiles import load
from talaria.profiles.fit import DECODE, PREFILL, fit_decode, fit_prefill, fit_profile
from talaria.profiles.plot import draw_fits
from talaria.profiles.points import DecodePoint, PrefillPoint, read_points
from talaria.profiles.profile import resolve

NEW, CACHED = (128, 1024, 8192, 65_536), (0, 8192, 100_000)
BATCHES, CONTEXTS = (1, 4, 32), (2048, 25_600, 100_000)


def prefill_points(base: float, slope: float, slope2: float) -> list[PrefillPoint]:
    return [
        PrefillPoint(tokens=new + cached, cached=cached, ms=1e3 * (base + slope * new + slope2 * new * (cached + new / 2)))
        for new in NEW
        for cached in CACHED
    ]


def decode_points(base: float, per_sequence: float, per_context: float) -> list[DecodePoint]:
    return [
        DecodePoint(batch=batch, context=context, ms=1e3 * (base + per_sequence * batch + per_context * batch * context))
        for batch in BATCHES
        for context in CONTEXTS
    ]


@given(st.tuples(st.floats(1e-3, 0.2), st.floats(1e-6, 1e-4), st.floats(1e-11, 1e-9)))
def test_prefill_points_give_back_the_coefficients_that_made_them(truth: tuple[float, float, float]) -> None:
    fit = fit_prefill(prefill_points(*truth))
    assert [fit.coefficients[name] for name in PREFILL] == pytest.approx(truth, rel=1e-4)
    assert fit.summary().max_error <= 1e-4


@given(st.tuples(st.floats(1e-3, 0.02), st.floats(1e-5, 1e-3), st.floats(1e-10, 1e-8)))
def test_decode_points_give_back_the_coefficients_that_made_them(truth: tuple[float, float, float]) -> None:
    fit = fit_decode(decode_points(*truth))
    assert [fit.coefficients[name] for name in DECODE] == pytest.approx(truth, rel=1e-4)


@given(st.lists(st.floats(0.5, 50), min_size=9, max_size=9))
def test_no_coefficient_is_negative_whatever_the_points(times_ms: list[float]) -> None:
    points = [point.model_copy(update={"ms": ms}) for point, ms in zip(decode_points(1, 1, 1), times_ms, strict=True)]
    assert all(value >= 0 for value in fit_decode(points).coefficients.values())


def test_a_point_off_the_curve_is_named_as_the_worst() -> None:
    points = prefill_points(0.01, 2e-5, 3e-10)
    off = points[-1].model_copy(update={"ms": points[-1].ms * 2})
    summary = fit_prefill([*points[:-1], off]).summary()
    assert summary.worst == f"tokens {off.tokens:,}, cached {off.cached:,}"
    assert summary.max_error > 0.2 > summary.median_error
    assert summary.ranges == {"tokens": (128, 165_536), "cached": (0, 100_000)}


def test_points_that_do_not_vary_are_refused() -> None:
    same = [DecodePoint(batch=8, context=1000, ms=5)] * 6
    with pytest.raises(InputError, match="do not determine decode_base_s"):
        fit_decode(same)


def points_document(**changes: Any) -> dict[str, Any]:
    model = {
        "prefill": [point.model_dump() for point in prefill_points(0.01, 2e-5, 3e-10)],
        "decode": [point.model_dump() for point in decode_points(0.005, 1e-4, 5e-9)],
    }
    document = {
        "schema": "talaria.points/1",
        "name": "mine",
        "description": "A bench run.",
        "source": "bench, today",
        "base": "b200",
        "models": {"Qwen3-32B": model},
    }
    return {**document, **changes}


def saved(document: Any, folder: Path) -> Path:
    path = folder / "points.json"
    path.write_text(json.dumps(document))
    return path


def test_a_points_file_completes_its_base_profile(tmp_path: Path) -> None:
    path = saved(
        points_document(hardware={"h2d_bytes_per_s": {"value": 4e10, "provenance": "measured", "source": "bandwidth test"}}), tmp_path
    )
    profile = resolve(fit_profile(read_points(path), where=str(path))[0])
    assert profile.hardware.h2d_bytes_per_s == 4e10
    assert profile.hardware.d2d_bytes_per_s == load("b200").hardware.d2d_bytes_per_s
    assert profile.timing("Qwen3-32B").prefill_s_per_token == pytest.approx(2e-5, rel=1e-4)
    assert profile.timing("GLM-5-nvfp4").prefill_s(1000, 0) == load("b200").timing("GLM-5-nvfp4").prefill_s(1000, 0)
    quantity = profile.file.document()["models"]["Qwen3-32B"]["prefill_base_s"]
    assert quantity["provenance"] == "fitted"
    assert "12 prefill points of bench, today" in quantity["source"]


def test_without_a_base_a_missing_quantity_is_named(tmp_path: Path) -> None:
    document = points_document(base=None, gpu="X100")
    path = saved(document, tmp_path)
    with pytest.raises(InputError, match=r"points\.json: missing field 'hardware\.tp'"):
        fit_profile(read_points(path), where=str(path))


@pytest.mark.parametrize(
    ("row", "value", "line"),
    [
        ("ms", -1.0, "models.Qwen3-32B.prefill[0].ms = -1.0; allowed: greater than 0"),
        ("ms", "fast", "models.Qwen3-32B.prefill[0].ms = 'fast'; allowed: a valid number"),
        ("tokens", 10**19, f"models.Qwen3-32B.prefill[0].tokens = {10**19}; allowed: less than or equal to {2**60}"),
        ("cached", 128, "models.Qwen3-32B.prefill[0]; allowed: cached below tokens, which is 128"),
        ("token", 5, "unknown field 'models.Qwen3-32B.prefill[0].token'; allowed: cached, ms, tokens; did you mean 'tokens'?"),
    ],
)
def test_a_wrong_point_is_one_line_with_its_place(row: str, value: Any, line: str, tmp_path: Path) -> None:
    document = points_document()
    document["models"]["Qwen3-32B"]["prefill"][0][row] = value
    path = saved(document, tmp_path)
    with pytest.raises(InputError) as caught:
        read_points(path)
    assert str(caught.value) == f"{path}: {line}"


def test_one_system_of_a_file_of_entries_is_fitted_over_the_profile_named_like_it(shared: Path) -> None:
    path = shared / "profiles" / "aiconfigurator_b200_h200_sglang.json"
    with pytest.raises(InputError, match="allowed: b200_sxm, h200_sxm"):
        read_points(path)
    with pytest.raises(InputError, match="did you mean 'h200_sxm'"):
        read_points(path, system="h200")
    file, fits = fit_profile(read_points(path, system="h200_sxm"), where=str(path))
    assert set(fits) == {"Qwen3-235B-fp8", "Qwen3-32B"}
    assert resolve(file).timing("Qwen3-32B") == load("h200").timing("Qwen3-32B")


def test_the_build_command_gives_the_shipped_profiles(shared: Path) -> None:
    for file in build(shared / "profiles" / "aiconfigurator_b200_h200_sglang.json"):
        built, shipped = resolve(file), load(file.name)
        assert built.hardware == shipped.hardware
        assert list(built.models) == list(shipped.models)
        for model in built.models:
            rebuilt, kept = built.timing(model), shipped.timing(model)
            for field in rebuilt.__dataclass_fields__:
                assert getattr(rebuilt, field) == pytest.approx(getattr(kept, field), rel=1e-4, abs=1e-15), (file.name, model, field)


def test_the_same_fit_draws_the_same_bytes(tmp_path: Path) -> None:
    path = saved(points_document(), tmp_path)
    fits = fit_profile(read_points(path), where=str(path))[1]
    drawn = draw_fits(fits, Path("fit.png"))
    assert drawn.startswith(b"\x89PNG") and drawn == draw_fits(fits, Path("fit.png"))
