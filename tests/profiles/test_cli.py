"""``talaria-sim profile``: one JSON document on stdout, one line on stderr, exit codes that scripts can rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from talaria.cli.main import run_command
from talaria.profiles import load, names
from tests.profiles.test_fit import points_document, saved


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run_command(["profile", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_list_names_every_shipped_profile(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, "list")
    assert [row["name"] for row in document["profiles"]] == list(names())
    assert run_command(["profile", "list"]) == 0
    assert all(name in capsys.readouterr().out for name in ["paper-tp8"])


def test_show_prints_the_whole_profile_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    profile = load("paper-tp4")
    assert run_json(capsys, "show", "paper-tp4") == {**profile.file.document(), "hash": profile.hash}
    assert run_command(["profile", "show", "paper-tp4"]) == 0
    printed = capsys.readouterr().out
    assert profile.hash in printed
    assert "published" in printed


def test_fit_writes_a_profile_that_loads_and_reports_every_residual(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    points, out, plot = saved(points_document(), tmp_path), tmp_path / "mine.json", tmp_path / "mine.svg"
    document = run_json(capsys, "fit", str(points), "-o", str(out), "--plot", str(plot))
    assert load(str(out)).name == "mine"
    assert plot.read_text().lstrip().startswith("<?xml")
    prefill = document["models"]["Qwen3-32B"]["prefill"]
    assert len(prefill["points"]) == 12
    assert all(abs(point["error"]) < 1e-3 for point in prefill["points"])
    assert run_command(["profile", "fit", str(points), "-o", str(out)]) == 0
    assert "Qwen3-32B" in capsys.readouterr().out


def test_check_exits_1_only_on_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["profile", "check", "b200"]) == 0
    assert "0 errors" in capsys.readouterr().out
    document = load("b200").file.document()
    document["hardware"]["d2d_bytes_per_s"]["value"] = 1e9
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(document))
    assert run_command(["profile", "check", str(path)]) == 1
    assert "error: hardware.d2d_bytes_per_s" in capsys.readouterr().out
    path.write_text(load("b200").file.text())
    assert run_json(capsys, "check", str(path))["hash"] == load("b200").hash


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "papertp8"], ["papertp8", "did you mean 'paper-tp8'?"]),
        (["check", "missing/file.json"], ["missing/file.json", "cannot read"]),
        (["fit", "missing.json", "-o", "x.json"], ["missing.json", "cannot read"]),
        (["show"], ["NAME"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    assert run_command(["profile", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1
    assert all(word in printed.err for word in words)


def test_a_fit_that_fails_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    points = saved(points_document(base="b2000"), tmp_path)
    assert run_command(["profile", "fit", str(points), "-o", str(tmp_path / "out.json")]) == 2
    assert "did you mean 'b200'?" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["points.json"]


def test_an_unknown_plot_format_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    points = saved(points_document(), tmp_path)
    assert run_command(["profile", "fit", str(points), "-o", str(tmp_path / "out.json"), "--plot", str(tmp_path / "fit.bmpx")]) == 2
    assert "cannot draw '.bmpx'; allowed:" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["points.json"]
