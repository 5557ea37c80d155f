"""``talaria-sim tune`` and ``sweep`` as an operator uses them: files, resumes, exact reproduction, one line for bad input."""

from __future__ import annotations

import errno
import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna import load_study
from optuna.exceptions import StorageInternalError

from talaria.cli import policyfile
from talaria.cli.main import run_command
from talaria.report import files
from talaria.tune.storage import opened
from tests.small import SCENARIO

COMMAND = ["tune", "--scenario", "small.yaml", "--knobs", "tau,linger", "--validation", "10000:10003"]
LONG_S = 240


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SCENARIO)
    return tmp_path


@pytest.fixture
def bare_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a small study's time; one test does it."""
    monkeypatch.setattr("talaria.tune.figures.pictures", lambda *_: {})


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run_command([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_study_leaves_a_policy_a_page_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, *COMMAND, "--trials", "12", "--out", "out")
    assert printed["schema"] == "talaria.tune/1" and printed["trials"]["finished"] == 12
    assert json.loads(Path("out/tune.json").read_text()) == printed
    assert {path.name for path in Path("out").iterdir()} == {
        "policy.yaml", "report.html", "tune.json", "study.db", "knobs.png", "map.png", "search.png", "importance.png",
    }  # fmt: skip
    page = Path("out/report.html").read_text()
    assert "Gain on new draws" in page and "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert run_command([*COMMAND, "--trials", "12", "--out", "out"]) == 0
    shown = capsys.readouterr()
    assert "baseline: each scenario as it runs untuned: tau 1, linger 1.5" in shown.err
    assert "12 trials" in shown.out and "better by (95 %)" in shown.out and "wrote out/policy.yaml" in shown.err


@pytest.mark.usefixtures("bare_figures")
def test_run_with_the_policy_reproduces_the_validated_numbers_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = document(capsys, *COMMAND, "--trials", "8", "--out", "out", "--set", "max_wait_rounds=5", "--config", "no-hkvr")
    again = document(capsys, "run", "--scenario", "small.yaml", "--policy", "out/policy.yaml", "--seeds", "10000:10003")
    assert again["metrics"]["sct_p95_s"] == tuned["validation"]["by_scenario"]["small"]["sct_p95_s"]["tuned"]
    assert (again["config"], again["policy"]["max_wait_rounds"]) == ("no-hkvr", 5)
    assert {name: again["policy"][name] for name in ("tau", "linger")} == tuned["best"]["knobs"]


@pytest.mark.usefixtures("bare_figures")
def test_the_policy_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = document(capsys, *COMMAND, "--trials", "4", "--out", "out")
    written = yaml.safe_load(Path("out/policy.yaml").read_text())
    about = written["provenance"]
    assert written["knobs"] == tuned["best"]["knobs"] and about["units"] == {"tau": "s", "linger": "s"}
    assert (about["study"], about["trial"], about["scenarios"]) == ("tune", tuned["best"]["trial"], tuned["task"]["scenarios"])
    assert set(about["profiles"]) == {"paper-tp8"} and about["validation"]["objectives"] == tuned["validation"]["objectives"]
    assert policyfile.load(Path("out/policy.yaml")).config == "talaria"


@pytest.mark.usefixtures("bare_figures")
def test_a_policy_with_instances_comes_with_its_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--knobs", "tau,instances=1:3", "--objective", "sct_p95_s,cost", "--trials", "8", "--out", "out"]
    tuned = document(capsys, *COMMAND, *command)
    again = document(capsys, "run", "--scenario", "out/scenario-small.yaml", "--policy", "out/policy.yaml", "--seeds", "10000:10003")
    assert again["metrics"]["sct_p95_s"] == tuned["validation"]["by_scenario"]["small"]["sct_p95_s"]["tuned"]
    assert tuned["validation"]["by_scenario"]["small"]["cost"]["tuned"] == tuned["best"]["knobs"]["instances"]


@pytest.mark.usefixtures("bare_figures")
def test_the_same_command_goes_on_and_writes_what_one_go_had_written(capsys: pytest.CaptureFixture[str]) -> None:
    document(capsys, *COMMAND, "--trials", "8", "--out", "parts")
    parts, whole = (document(capsys, *COMMAND, "--trials", "16", "--out", name) for name in ("parts", "whole"))
    for printed in (parts, whole):
        del printed["storage"], printed["policy"]
    assert parts == whole and parts["trials"]["finished"] == 16


@pytest.mark.usefixtures("bare_figures")
def test_a_policy_file_is_where_the_search_begins(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("schema: talaria.policy/1\nconfig: no-sp\nknobs: {tau: 3, gamma: 0.8}\n")
    tuned = document(capsys, *COMMAND, "--trials", "1", "--out", "out", "--policy", "mine.yaml")
    assert tuned["best"]["knobs"] == {"tau": 3.0, "linger": 1.5} == tuned["baseline"]["small"] and tuned["task"]["config"] == "no-sp"
    assert yaml.safe_load(Path("out/policy.yaml").read_text())["knobs"] == {"gamma": 0.8, "tau": 3.0, "linger": 1.5}


@pytest.mark.usefixtures("bare_figures")
def test_no_significant_gain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*COMMAND, "--trials", "1", "--out", "out"]) == 0
    shown = capsys.readouterr()
    assert "sct_p95_s: no significant gain over the baseline on new draws" in shown.err and "no significant gain" in shown.out


BAD = [
    (["--objective", "sct_p96_s"], "--objective: unknown objective 'sct_p96_s'"),
    (["--objective", "cost"], "add instances=1:8 to --knobs"),
    (["--constraint", "calls_shed<=-1"], "calls_shed<=-1 is impossible"),
    (["--constraint", "deadline_risk<=0"], "no trial of 2 holds the constraints"),
    (["--knobs", "taw"], "--knobs: unknown knob 'taw'"),
    (["--set", "tau=1"], "tau is varied and also set"),
    (["--seeds", "3", "--validation", "2:5"], "holds draw 2 of the search"),
    (["--validation", "5:3"], "--validation: '5:3' means 0 seeds"),
    (["--validation", "x"], "--validation: 'x' is no number of seeds"),
    (["--study", " "], "--study: ' ' names no study"),
    (["--sampler", "nsga2"], "nsga2 does not fit one objective"),
    (["--sampler", "tpee"], "did you mean 'tpe'"),
    (["--scenario", "small.yaml,small.yaml"], "scenario 'small' is given twice"),
    (["--scenario", "paper-tp88"], "did you mean 'paper-tp8'"),
    (["--storage", "study.db"], "for a file: sqlite:///study.db"),
    (["--storage", ""], "for a file: sqlite:///FILE"),
    (["--storage", "sqlite://"], "names no file: nothing would be kept"),
    (["--storage", "sqlite:///small.yaml"], "file is not a database"),
    (["--storage", "journal:small.yaml"], "is no journal of Optuna's"),
    (["--storage", "postgresql://me:secret@127.0.0.1:1/db"], "postgresql://me:***@127.0.0.1:1/db: cannot be used: connection"),
    (["--storage", "oracle://host/db"], "pip install '.[tune]'"),
    (["--storage", "nosuch://host/db"], "nosuch://host/db: cannot be used"),
    (["--storage", "grpc://host"], "'host' is no address"),
    (["--study", "theirs", "--storage", "sqlite:///kept.db"], "study theirs: is no study of talaria's"),
    (["--study", "mine", "--storage", "sqlite:///kept.db"], "study mine: was begun with other"),
]


@pytest.mark.usefixtures("bare_figures")
@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_changes_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("talaria.tune.study.APPEARS_S", 0.0)
    if "sqlite:///kept.db" in arguments:
        import optuna

        with opened("sqlite:///kept.db") as kept:
            optuna.create_study(storage=kept, study_name="theirs")
        assert run_command([*COMMAND, "--trials", "1", "--study", "mine", "--storage", "sqlite:///kept.db", "--out", "other"]) == 0
        Path("small.yaml").write_text(SCENARIO.replace("gap_cap_s: 10", "gap_cap_s: 11"))
    Path("out").mkdir()
    Path("out/policy.yaml").write_text("mine")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run_command([*COMMAND, "--trials", "2", "--out", "out", *arguments]) == 2
    shown = capsys.readouterr()
    (error,) = [line for line in shown.err.splitlines() if not line.startswith(("scenario small: ", "baseline: "))]
    assert said in error and "secret" not in shown.err and shown.out == ""
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.name != "study.db"}
    assert after == before


HALF = '{"op_code":8,"worker'


@pytest.mark.usefixtures("bare_figures")
@pytest.mark.parametrize("end", [HALF, HALF + "\n"])
def test_a_journal_that_ends_in_half_a_line_is_not_added_to(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, "--storage", "journal:kept.log", "--out", "out"]
    assert run_command([*command, "--trials", "1"]) == 0
    whole = Path("kept.log").read_text()
    Path("kept.log").write_text(whole + end)
    assert run_command([*command, "--trials", "2"]) == 2
    assert "--storage journal:kept.log: ends in half a line; take that line out: sed -i '$d' kept.log" in capsys.readouterr().err
    assert Path("kept.log").read_text() == whole + end
    Path("kept.log").write_text(whole)
    assert run_command([*command, "--trials", "2"]) == 0


def test_a_database_of_somebody_elses_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect("theirs.db")) as theirs:
        theirs.execute("create table studies (x int)")
    assert run_command([*COMMAND, "--trials", "1", "--storage", "sqlite:///theirs.db", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --storage sqlite:///theirs.db: cannot be used: no such column: studies.study_id; allowed:")


REFUSALS = [StorageInternalError("attempt to write a readonly database"), OSError(errno.EROFS, "Read-only", "kept.log")]


@pytest.mark.parametrize("command", [[*COMMAND, "--trials", "2"], ["sweep", "tau", "--scenario", "small.yaml", "--seeds", "1"]])
@pytest.mark.parametrize("error", REFUSALS)
def test_a_place_that_takes_no_study_is_bad_input_and_not_a_loss(
    command: list[str], error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise error

    monkeypatch.setattr("optuna.create_study", refused)
    assert run_command([*command, "--storage", "sqlite:///kept.db", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --storage sqlite:///kept.db: cannot be used: ") and str(error) in said


@pytest.mark.usefixtures("bare_figures")
def test_an_interrupted_validation_is_said_and_leaves_no_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("talaria.tune.output.validate", interrupted)
        assert run_command([*COMMAND, "--trials", "2", "--out", "out"]) == 130
    assert "interrupted: 2 of 2 trials are kept; the same command goes on" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["study.db"]
    assert run_command([*COMMAND, "--trials", "2", "--out", "out"]) == 0


@pytest.mark.usefixtures("bare_figures")
def test_files_that_find_no_room_leave_those_of_before(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command([*COMMAND, "--trials", "2", "--out", "out"]) == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir() if path.name != "study.db"}
    beside, left = files._beside, iter(range(len(before) - 1))

    def without_room(path: Path) -> tuple[int, str]:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return beside(path)

    monkeypatch.setattr(files, "_beside", without_room)
    assert run_command([*COMMAND, "--trials", "3", "--out", "out"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: cannot write: No space left on device"
    assert {path: path.read_bytes() for path in Path("out").iterdir() if path.name != "study.db"} == before


def test_a_storage_that_goes_away_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise StorageInternalError("server closed the connection")

    monkeypatch.setattr("talaria.tune.search.Search.run", gone)
    assert run_command([*COMMAND, "--trials", "2", "--out", "out"]) == 1
    assert "server closed the connection; what is finished is kept" in capsys.readouterr().err


def test_ctrl_c_keeps_all_finished_trials(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.tune.interrupted", *COMMAND, "--trials", "200", "--out", "out", "--jobs", "1"]
    repository = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": str(repository)}) as process:
        until_s = time.monotonic() + LONG_S
        while not Path("in-a-trial").exists():
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 130 and "interrupted: 8 of 200 trials are kept; the same command goes on" in said
    with opened("sqlite:///out/study.db") as kept:
        states = [trial.state.name for trial in load_study(study_name="tune", storage=kept).get_trials()]
    assert states == ["COMPLETE"] * 8 + ["FAIL"] * 4 + ["WAITING"] * 4
    assert not Path("out/policy.yaml").exists()


def test_a_swept_study_goes_on_where_it_stopped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sweep", "linger", "--scenario", "small.yaml", "--values", "0,1,2", "--seeds", "2", "--storage", "sqlite:///kept.db"]
    first = document(capsys, *command)
    monkeypatch.setattr("talaria.sim.batch.simulate", None)
    second = document(capsys, *command)
    assert first == second
    assert run_command(command) == 0
    assert "has 3 of 3 points already" in capsys.readouterr().err


def test_points_that_no_process_survived_are_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.tune.sweep.Sweep.run", lambda *_: True)
    assert run_command(["sweep", "linger", "--scenario", "small.yaml", "--values", "0,1,2", "--seeds", "2"]) == 1
    assert "3 of 3 points are missing: each process that ran them died" in capsys.readouterr().err


def test_a_sweep_into_a_directory_keeps_its_study_there(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "tau,linger", "--scenario", "small.yaml", "--values", "0,1", "--values", "0,2", "--seeds", "1", "--out", "out"]
    printed = document(capsys, *command)
    assert [point["value"] for point in printed["points"]] == [[0.0, 0.0], [0.0, 2.0], [1.0, 0.0], [1.0, 2.0]]
    assert {"study.db", "sweep.json", "sweep-tau-linger.png", "tau=0.0,linger=2.0"} <= {path.name for path in Path("out").iterdir()}
    assert document(capsys, *command) == printed
