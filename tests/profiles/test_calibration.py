"""Calibrations: what was fitted is what is shipped, within its bounds, and the core does what its words say."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from studies.calibrate import report, testbed, testbeds
from studies.calibrate.__main__ import main
from studies.calibrate.loss import IMPOSSIBLE, Trial, loss, miss
from studies.calibrate.parameters import Parameter, values_at
from talaria.profiles.load import DATA, read_json
from talaria.reproduce.targets import RunSource

FITTED = [testbeds.load(name) for name in testbeds.NAMES if report.path(name).exists()]
SOURCE = RunSource(run="quickstart", config="talaria", metric="sct_p50_s")


def named(bed: testbed.Testbed) -> str:
    return bed.name


@pytest.mark.parametrize("bed", FITTED, ids=named)
def test_shipped_files_hold_the_fitted_values_and_no_others(bed: testbed.Testbed) -> None:
    shipped, put = bed.draft(), bed.draft()
    bed.put(put, report.values_of(report.load(bed.name)))
    assert put.profile == shipped.profile == read_json(DATA / f"{bed.profile}.json")
    assert put.scenarios == shipped.scenarios and put.components == shipped.components


@pytest.mark.parametrize("bed", FITTED, ids=named)
def test_every_parameter_has_a_reason_bounds_and_both_sensitivities(bed: testbed.Testbed) -> None:
    rows = report.load(bed.name)["parameters"]
    assert [row["name"] for row in rows] == [parameter.name for parameter in bed.parameters]
    for row, parameter in zip(rows, bed.parameters, strict=True):
        assert parameter.low <= row["value"] <= parameter.high and parameter.low < parameter.high and parameter.why
        assert set(row["sensitivity"]) == {"-25%", "+25%"}


@pytest.mark.parametrize("bed", FITTED, ids=named)
def test_fits_use_seeds_below_1000_and_show_every_number_that_they_are_held_to(bed: testbed.Testbed) -> None:
    result = report.load(bed.name)
    assert max(*result["seeds"]["search"], *result["seeds"]["polish"]) < 1000
    assert [row["name"] for row in result["residuals"]] == [target.name for target in bed.fitted]


def test_a_miss_is_one_at_its_bar() -> None:
    times, opens = testbed.Fitted("t", 10.0, SOURCE, 0.2), testbed.Fitted("o", 0.0, SOURCE, 3.0, absolute=True)
    assert miss(times, 10.0) == 0.0 and miss(times, 10.0 * math.exp(0.2)) == pytest.approx(1.0)
    assert miss(times, 10.0 * math.exp(-0.2)) == pytest.approx(-1.0) and miss(opens, 3.0) == pytest.approx(1.0)
    assert miss(times, None) > 1.0 and miss(times, 0.0) < -1.0


def test_the_loss_is_squared_inside_the_bar_and_linear_far_beyond_it() -> None:
    small, large = np.array([0.1, 0.0]), np.array([0.0, 100.0])
    assert loss(small) == pytest.approx(0.01, rel=0.01) and loss(2 * large) == pytest.approx(2 * loss(large), rel=0.01)


@pytest.mark.parametrize(("log", "low", "high"), [(False, -1.0, 3.0), (True, 1e9, 1e12)])
def test_a_parameter_and_its_place_between_the_bounds_are_one_to_one(log: bool, low: float, high: float) -> None:
    parameter = Parameter("x", "", low, high, low, "a test", (), log)
    for share in (0.0, 0.25, 1.0):
        (value,) = values_at([parameter], np.array([share])).values()
        assert parameter.to_unit(value) == pytest.approx(share, abs=1e-3)
    assert (parameter.from_unit(-1.0), parameter.from_unit(2.0)) == (low, high)
    assert Parameter("n", "", 4.0, 7.0, 5.0, "a test", (), whole=True).from_unit(0.4) == 5.0


@pytest.mark.parametrize("bed", FITTED, ids=named)
def test_values_with_which_no_run_is_possible_are_far_from_every_number(bed: testbed.Testbed) -> None:
    draft = bed.draft()
    for scenario in draft.scenarios.values():
        scenario.setdefault("knobs", {})["t_ttft"] = 0.1
        scenario["workload"]["depth_cap"] = 0
    residuals, found = Trial(bed, draft, report.values_of(report.load(bed.name))).residuals([0])
    assert found is None and set(residuals.tolist()) == {IMPOSSIBLE}


@pytest.mark.parametrize("text", [None, "{", "{}", "[]"])
@pytest.mark.parametrize("command", ["show", "again", "apply"])
def test_a_result_that_is_not_there_is_one_line(
    command: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["calibrate", command, "tp8"])
    if text is not None:
        report.path("tp8").write_text(text)
    assert main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {report.path('tp8')}") and said.count("\n") == 1
