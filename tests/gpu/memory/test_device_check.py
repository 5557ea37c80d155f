"""``scripts/device_check`` without a device: it passes where bytes move, and notices where they do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from talaria.gpu.doctor import device
from talaria.gpu.memory.cpu import CpuMover, CpuStream
from talaria.gpu.memory.mover import Copies, Stream

SCRIPT = Path(__file__).parents[3] / "scripts" / "device_check"


class Lazy(CpuMover):
    """Moves the first bytes only."""

    def __init__(self, copies: int) -> None:
        self.copies = copies

    def stream(self) -> Stream:
        mover = self

        class Stops(CpuStream):
            def move(self, copies: Copies) -> None:
                mover.copies -= 1
                if mover.copies >= 0:
                    super().move(copies)

        return Stops()


def test_all_bytes_are_right_on_the_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device_check", "--cpu"])
    assert device.main() == 0
    said = capsys.readouterr().out
    for what in ("peak d2d", "checkpoint KV", "restore KV", "stage, chunk by chunk", "switch, half staged: partial", "all bytes are right"):
        assert what in said


def test_bytes_that_were_not_moved_are_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the mover stops."""
    monkeypatch.setattr(sys, "argv", ["device_check", "--cpu"])
    for copies in (0, 20, 80, 140, 250, 280):
        monkeypatch.setattr(device, "CpuMover", lambda copies=copies: Lazy(copies))
        assert device.main() == 1, copies
        assert "is wrong" in capsys.readouterr().err


def test_memory_that_nobody_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check = device.Check(CpuMover(), device.ON_CPU)
    monkeypatch.setattr(device, "LEFT", 0x5B)
    with pytest.raises(device.WrongBytes, match="what a process left: byte 0"):
        check.inheritance(on_cpu=True)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    with pytest.raises(device.WrongBytes, match="could not leave"):
        check.inheritance(on_cpu=True)
    check.close()


def test_registrations_are_timed_beside_copies() -> None:
    check = device.Check(CpuMover(), device.ON_CPU)
    check.arena.show(check.windows[0], range(check.arena.count))
    check.registrations()
    check.close()
    assert [line.split("  ")[0] for line in check.lines if line[0] != " "] == [
        "register host memory", "register it in another mapping"
    ]  # fmt: skip


def test_without_a_device_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[str, CpuMover]:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(device, "_cuda", missing)
    monkeypatch.setattr(sys, "argv", ["device_check"])
    assert device.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_needs_nothing_of_what_serves() -> None:
    command = "import sys; sys.modules['msgspec'] = None; from talaria.gpu.doctor.device import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", command, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_in_an_environment_that_is_not_the_checkouts_own_it_takes_python3(tmp_path: Path) -> None:
    for name, text in (("scripts/device_check", SCRIPT.read_text()), ("bin/python3", '#!/bin/sh\necho "$@"\n')):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    paths = f"{tmp_path / 'bin'}:{Path(shutil.which('bash') or '').parent}:{Path(shutil.which('dirname') or '').parent}"
    done = subprocess.run([tmp_path / "scripts/device_check", "--cpu"], capture_output=True, text=True, timeout=60, env={"PATH": paths})
    assert (done.returncode, done.stdout) == (0, "-m talaria.gpu.doctor.device --cpu\n"), done.stderr
