"""run, compare, sweep, replay-decisions and report, as a script would use them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from talaria.cli.main import run_command
from talaria.report.metrics import METRICS
from talaria.sim.run import simulate
from tests.small import SCENARIO


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return "small.yaml"


@pytest.fixture
def interrupted_at_job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the n-th simulation (from 1) end as if Ctrl-C had been pressed in it."""

    def arm(number: int) -> None:
        calls = iter(range(1, 1000))

        def interruptible(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return simulate(*arguments, **keywords)

        monkeypatch.setattr("talaria.sim.batch.simulate", interruptible)
        monkeypatch.setattr("talaria.sim.parallel.WORTH_WORKERS_S", math.inf)

    return arm


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """What a command prints with --json: one document on stdout and nothing else there."""
    assert run_command([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_run_prints_every_metric_of_the_contract(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "run", "--scenario", scenario, "--seeds", "4:6", "--set", "tau=2", "--config", "no-sp")
    assert set(printed) == {
        "schema", "scenario", "config", "policy", "trace", "seeds", "metrics", "spread", "per_seed", "provenance", "host",
    }  # fmt: skip
    assert (printed["scenario"], printed["config"], printed["seeds"], printed["policy"]["tau"]) == ("small", "no-sp", [4, 5], 2.0)
    assert set(printed["metrics"]) == set(METRICS) and set(printed["host"]) == {"sim_cpu_s", "wall_s", "peak_rss_mib"}


def test_run_says_on_stderr_what_it_runs_and_shows_a_table(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--scenario", scenario]) == 0
    printed = capsys.readouterr()
    assert printed.err == "scenario small: Two sessions on one server.\n"
    assert "sct_p50_s" in printed.out and "small · talaria · seed 0" in printed.out


def test_a_bad_knob_in_a_scenario_file_is_one_line_that_names_the_file(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(scenario).write_text(SCENARIO + "knobs: {taw: 1}\n")
    assert run_command(["run", "--scenario", scenario]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: small.yaml: knobs: unknown knob 'taw'") and line.endswith("did you mean 'tau'?\n")


def test_a_policy_file_is_overridden_by_set(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("policy.yaml").write_text("schema: talaria.policy/1\nconfig: no-hkvr\nknobs: {tau: 3, linger: 0.5}\n")
    printed = document(capsys, "run", "--scenario", scenario, "--policy", "policy.yaml", "--set", "tau=4")
    assert (printed["config"], printed["policy"]["tau"], printed["policy"]["linger"]) == ("no-hkvr", 4.0, 0.5)


def test_a_run_directory_replays_and_reports(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "run", "--scenario", scenario, "--out", "run", "--decisions", "--timeline")
    written = json.loads(Path("run/run.json").read_text())
    assert {**written, "host": printed["host"]} == printed
    assert run_command(["replay-decisions", "run/decisions.jsonl"]) == 0
    assert capsys.readouterr().out == "0 differences\n"
    Path("run/report.html").unlink()
    assert document(capsys, "report", "run") == written and Path("run/report.html").exists()
    (placed,) = document(capsys, "report", "run", "--call", "i0000-m0:1")["placements"]
    assert (placed["session"], placed["turn"], placed["chosen"]) == ("i0000-m0", 1, "cold-0")


def test_a_log_of_another_policy_is_exit_1_with_the_differences(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--scenario", scenario, "--out", "run", "--decisions"]) == 0
    log = Path("run/decisions.jsonl")
    log.write_text(log.read_text().replace('"out":{"Routed":{"call_id":1,', '"out":{"Routed":{"call_id":99,', 1))
    capsys.readouterr()
    assert run_command(["replay-decisions", str(log)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 difference" and lines[1].endswith("router place") and '"call_id": 99' in lines[2]


def test_compare_pairs_every_two_configs(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "compare", "--scenario", scenario, "--configs", "talaria,no-sp,no-hkvr", "--seeds", "2")
    assert set(printed["configs"]) == {"talaria", "no-sp", "no-hkvr"}
    pairs = {(entry["a"], entry["b"]) for entry in printed["paired"]}
    assert pairs == {("talaria", "no-sp"), ("talaria", "no-hkvr"), ("no-sp", "no-hkvr")}
    assert run_command(["compare", "--scenario", scenario, "--configs", "talaria,no-sp", "--seed", "0"]) == 0
    assert "no-sp" in capsys.readouterr().out


@pytest.mark.parametrize(("configs", "said"), [("full,preble", True), ("talaria,no-sp", False)])
def test_compare_says_that_routers_cannot_differ_on_one_instance(
    scenario: str, configs: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["compare", "--scenario", scenario, "--configs", configs, "--seed", "0"]) == 0
    assert ("one instance" in capsys.readouterr().err) is said


def test_sweep_prints_its_points_and_draws_them(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "sweep", "linger", "--scenario", scenario, "--values", "0,1.5", "--seeds", "2")
    assert (printed["schema"], printed["knob"], [point["value"] for point in printed["points"]]) == ("talaria.sweep/1", "linger", [0, 1.5])
    assert printed["plot"] == "talaria-out/sweep-linger.png" and Path(printed["plot"]).read_bytes().startswith(b"\x89PNG")


def test_a_sweep_that_moves_nothing_says_so_beside_its_table(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sweep", "mu0", "--scenario", scenario, "--values", "0,0.001", "--seeds", "2"]) == 0
    said = capsys.readouterr().err
    assert "mu0 changes nothing of this" in said and "--config" in said
    assert run_command(["sweep", "t_ttft", "--scenario", scenario, "--values", "2,20", "--seeds", "2"]) == 0
    assert "changes nothing" not in capsys.readouterr().err


def test_an_interrupted_run_shows_and_writes_its_finished_seeds(
    scenario: str, capsys: pytest.CaptureFixture[str], interrupted_at_job: Any
) -> None:
    interrupted_at_job(3)
    printed = document(capsys, "run", "--scenario", scenario, "--seeds", "5", "--out", "run", code=130)
    assert printed["seeds"] == json.loads(Path("run/run.json").read_text())["seeds"] == [0, 1]


def test_an_interrupted_sweep_shows_its_finished_points(scenario: str, capsys: pytest.CaptureFixture[str], interrupted_at_job: Any) -> None:
    interrupted_at_job(6)
    printed = document(capsys, "sweep", "linger", "--scenario", scenario, "--seeds", "2", code=130)
    assert len(printed["points"]) == 2 and Path(printed["plot"]).exists()


@pytest.mark.parametrize("command", [["run"], ["compare"], ["sweep", "linger"]], ids=lambda command: command[0])
def test_an_interrupt_before_anything_is_finished_leaves_nothing(
    command: list[str], scenario: str, capsys: pytest.CaptureFixture[str], interrupted_at_job: Any
) -> None:
    interrupted_at_job(1)
    before = sorted(Path().rglob("*"))
    assert run_command([*command, "--scenario", scenario, "--json"]) == 130
    assert capsys.readouterr().out == "" and sorted(Path().rglob("*")) == before


# Figures take most of a run's time; that they are the same bytes is shown in tests/report.
WITHOUT_FIGURES = "from talaria.cli.main import main; from talaria.report import html; html.render = lambda *_: ''; main()"


def test_the_same_seed_writes_the_same_bytes_in_any_process(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.report.html.render", lambda *_: "")
    command = ["run", "--scenario", scenario, "--decisions", "--timeline", "--out"]
    assert run_command([*command, "here"]) == 0
    another_process = [sys.executable, "-c", WITHOUT_FIGURES, *command, "there"]
    subprocess.run(another_process, env={**os.environ, "PYTHONHASHSEED": "12345"}, check=True, capture_output=True)
    names = sorted(path.name for path in Path("here").iterdir())
    different = [name for name in names if Path("here", name).read_bytes() != Path("there", name).read_bytes()]
    assert {"run.json", "decisions.jsonl", "calls.parquet"} <= set(names) and different == []
