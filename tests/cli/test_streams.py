"""Streams that are closed, full or read by nobody: quiet or one line, never a traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from talaria.cli.main import run_command

COMMAND = [sys.executable, "-c", "from talaria.cli.main import main; main()"]

needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command run by a shell with these redirections or pipes behind it."""
    line = f'"$@" {redirections}'
    return subprocess.run(["sh", "-c", line, "sh", *COMMAND, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("knobs",), ("knobs", "--json")])
def test_a_reader_that_leaves_early_is_no_error_message(arguments: tuple[str, ...]) -> None:
    assert shell("| true", *arguments).stderr == ""


@pytest.mark.parametrize("arguments", [("knobs",), ("knobs", "--json")])
def test_a_closed_stdout_is_no_error(arguments: tuple[str, ...]) -> None:
    done = shell(">&-", *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_messages_do_not_reach_stdout_when_stderr_is_closed() -> None:
    done = shell("2>&-", "run", "--config", "no-such")
    assert (done.returncode, done.stdout) == (2, "")


@needs_dev_full
@pytest.mark.parametrize("arguments", [("knobs",), ("knobs", "--json")])
def test_a_full_stdout_is_one_line_and_exit_1(arguments: tuple[str, ...]) -> None:
    done = shell("> /dev/full", *arguments)
    assert (done.returncode, done.stderr) == (1, f"error: cannot write: {os.strerror(errno.ENOSPC)}\n")


def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("talaria.report.parquet.RecordWriter.add", full)
    monkeypatch.setattr("talaria.report.parquet.RecordWriter.close", full)
    assert run_command(["compare", "--configs", "talaria,no-sp", "--seeds", "1", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: cannot write: {os.strerror(errno.ENOSPC)}"
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert list((tmp_path / "out").iterdir()) == []


def test_an_error_without_a_reason_of_the_system_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("not from the system")

    monkeypatch.setattr("talaria.cli.listing._show", broken)
    with pytest.raises(OSError, match="not from the system"):
        run_command(["knobs"])
