"""The command line's manners: one line for bad usage, the right exit code, stdout for results only, nothing imported in vain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from talaria import __version__
from talaria.cli.listing import knobs_markdown
from talaria.cli.main import COMMANDS, run_command
from talaria.policy.knobs import KNOBS
from tests.conftest import REPOSITORY

HEAVY = ("scipy", "matplotlib", "pyarrow", "pandas", "pydantic", "simpy", "numpy", "yaml", "torch", "sglang", "optuna")


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command line that must exit with 2 and print nothing on stdout."""
    code = run_command(arguments)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (code, printed.out, len(lines)) == (2, "", 1), printed.err
    return lines[0]


BAD_USAGE = [
    (["swep"], ["'swep'", "allowed: compare, configs", "did you mean 'sweep'"]),
    (["run", "--sedd", "3"], ["talaria-sim run", "'--sedd'", "--seeds", "did you mean '--seed'"]),
    (["run", "--seed"], ["--seed", "requires an argument"]),
    (["run", "--seed", "one"], ["--seed", "'one'", "allowed: an integer from 0"]),
    (["run", "stray"], ["talaria-sim run", "stray"]),
    (["run", "--seed", "-1"], ["--seed", "'-1'", "allowed: an integer from 0"]),
    (["run", "--seed", "1", "--seeds", "2"], ["--seed", "--seeds"]),
    (["run", "--seeds", "5:2"], ["--seeds", "'5:2'", "allowed: 1 to"]),
    (["run", "--seeds", "a few"], ["--seeds", "'a few'", "allowed: N (0..N-1) or A:B"]),
    (["run", "--set", "taw=1"], ["--set", "'taw'", "allowed: ", "did you mean 'tau'"]),
    (["run", "--set", "tau=-1"], ["--set", "tau=-1", "allowed: 0 to 60 s"]),
    (["run", "--set", "tau"], ["--set", "'tau'", "allowed: KNOB=VALUE", "tau=2"]),
    (["run", "--set", "tau=1", "--set", "tau=2"], ["--set", "'tau'", "twice"]),
    (["run", "--scenario", "quikstart"], ["--scenario", "'quikstart'", "allowed: ", "did you mean 'quickstart'"]),
    (["run", "--scenario", ""], ["--scenario", "''", "allowed: "]),
    (["run", "--config", ""], ["--config", "''", "allowed: "]),
    (["run", "--scenario", "./absent.yaml"], ["absent.yaml", "No such file"]),
    (["run", "--config", "talarai"], ["--config", "'talarai'", "allowed: ", "did you mean 'talaria'"]),
    (["run", "--policy", "absent.yaml"], ["absent.yaml", "No such file"]),
    (["run", "--trace", "absent.jsonl"], ["absent.jsonl", "No such file"]),
    (["run", "--map", "a=b"], ["--map", "add --trace FILE"]),
    (["run", "--arrivals", "trace"], ["--arrivals", "add --trace FILE"]),
    (["run", "--decisions"], ["--decisions", "add --out DIR"]),
    (["run", "--timeline"], ["--timeline", "add --out DIR"]),
    (["run", "--out", "/dev/null"], ["/dev/null", "no directory", "choose another --out"]),
    (["compare", "--configs", "talaria"], ["--configs", "allowed: two or more"]),
    (["compare", "--configs", "talaria,talaria"], ["--configs", "'talaria'", "twice"]),
    (["compare", "--configs", "talaria,nosp"], ["--configs", "'nosp'", "allowed: ", "did you mean 'no-sp'"]),
    (["compare", "--config", "talaria"], ["--config", "did you mean '--configs'?"]),
    (["sweep"], ["talaria-sim sweep", "KNOB"]),
    (["sweep", "taw"], ["KNOB", "'taw'", "allowed: ", "did you mean 'tau'"]),
    (["sweep", "tau,gamma,nu"], ["KNOB", "'tau,gamma,nu'", "allowed: one, or two"]),
    (["sweep", "tau", "--values", "1,2,-3"], ["--values", "tau=-3", "allowed: 0 to 60 s"]),
    (["sweep", "tau", "--values", "1,1.0"], ["--values", "'1,1.0'", "each value once"]),
    (["sweep", "tau", "--values", ","], ["--values", "holds no value", "allowed: 0 to 60 s"]),
    (["sweep", "tau,gamma", "--values", "1"], ["--values", "allowed: once per knob"]),
    (["sweep", "tau", "--set", "tau=1"], ["--set", "tau is swept", "leave one"]),
    (["replay-decisions"], ["talaria-sim replay-decisions", "LOG"]),
    (["replay-decisions", "absent.jsonl"], ["absent.jsonl", "No such file"]),
    (["report", "absent"], ["absent", "allowed: a directory that `talaria-sim run --out DIR` wrote"]),
    (["knobs", "--jsn"], ["talaria-sim knobs", "'--jsn'", "did you mean '--json'"]),
    (["trace"], ["talaria-sim trace", "allowed: ", "import"]),
    (["trace", "imprt"], ["talaria-sim trace", "'imprt'", "Did you mean 'import'"]),
    (["profile", "shw"], ["talaria-sim profile", "'shw'", "Did you mean 'show'"]),
]


@pytest.mark.parametrize(("arguments", "parts"), BAD_USAGE, ids=[" ".join(arguments) for arguments, _ in BAD_USAGE])
def test_bad_usage_is_one_line_that_names_where_what_and_the_way_out(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = complaint(capsys, *arguments)
    assert [part for part in parts if part not in line] == [], line
    assert list(tmp_path.iterdir()) == [], "bad usage leaves nothing behind"


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([]) == 0
    printed = capsys.readouterr().out
    assert [name for name in COMMANDS if f" {name} " not in printed] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([name, "--help"]) == 0
    assert f"talaria-sim {name}" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom talaria.cli.main import run_command\ncode = run_command(['--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_a_run_imports_no_plotting_statistics_or_columnar_library() -> None:
    script = (
        "import sys\nfrom talaria.cli.main import run_command\ncode = run_command(['run', '--json'])\n"
        "heavy = [name for name in ('scipy', 'matplotlib', 'pyarrow', 'pandas', 'jinja2') if name in sys.modules]\n"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "talaria.run/1"


def test_the_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("name", ["scenarios", "configs", "knobs"])
def test_a_listing_is_a_table_or_one_json_document(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert run_command([name]) == 0
    table = capsys.readouterr().out
    first = next(iter(rows[0]))
    assert rows and [row[first] for row in rows if row[first] not in table] == []


def test_the_knobs_page_is_current() -> None:
    assert (REPOSITORY / "docs" / "knobs.md").read_text(encoding="utf-8") == knobs_markdown(KNOBS)


def test_a_file_that_the_system_refuses_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device", "results/run.json")

    monkeypatch.setattr("talaria.cli.listing._show", refuse)
    assert run_command(["knobs"]) == 1
    assert capsys.readouterr().err == "error: results/run.json: No space left on device\n"


def test_a_mistake_of_ours_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.cli.listing._show", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_command(["knobs"])


def test_an_extra_that_is_not_installed_is_one_line() -> None:
    command = "import sys; sys.modules['msgspec'] = None; from talaria.cli.gpu import main; main()"
    done = subprocess.run([sys.executable, "-c", command, "doctor", "cluster.yaml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: msgspec is not installed; in a checkout: {sys.executable} -m pip install '.[serve]'\n"


def test_an_interrupt_is_exit_130_without_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("talaria.cli.listing._show", interrupt)
    assert run_command(["knobs"]) == 130
    assert capsys.readouterr().err == ""
