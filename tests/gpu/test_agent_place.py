"""The directory of an agent's sockets, of agents that end, live on and are killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from talaria.gpu.agent.place import own_directory

AGENT = """
import sys
from talaria.gpu.agent.place import own_directory

with own_directory() as directory:
    (directory / "arena").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""
PATIENCE_S = 60.0


def agent() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_agent_leaves_goes_with_the_next_ones_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (living, place), (killed, left) = agent(), agent()
    try:
        killed.kill()
        killed.communicate(timeout=PATIENCE_S)
        assert {*tmp_path.iterdir()} == {place, left} and (left / "arena").exists()
        (tmp_path / "talaria-instance-file").touch()
        with own_directory() as ours:
            assert {*tmp_path.iterdir()} == {place, ours, tmp_path / "talaria-instance-file"} and (place / "arena").exists()
            assert ours.stat().st_mode & 0o777 == 0o700
        living.communicate(timeout=PATIENCE_S)
        assert {*tmp_path.iterdir()} == {tmp_path / "talaria-instance-file"}
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate(timeout=PATIENCE_S)
