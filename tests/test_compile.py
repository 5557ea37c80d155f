"""The compiled modules: built from the sources with their constructors written out, with the same results."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import REPOSITORY

VALUES = '''
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass(slots=True)
class Value:
    """A value."""
    name: str
    """What it is called."""
    numbers: list[int] = field(default_factory=list)
    share: float = 0.5

    @property
    def total(self) -> int:
        return sum(self.numbers)

@dataclass(slots=True)
class Nothing:
    pass

@dataclass(slots=True)
class Own:
    x: int
    def __init__(self) -> None:
        self.x = 3

class Plain:
    x: int = 0
'''


def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, "values", "exec"), names)
    return names


def test_constructors_that_are_written_out_do_what_the_generated_ones_do() -> None:
    source = hook().with_constructors(VALUES)
    assert source.count("def __init__") == VALUES.count("def __init__") + 2
    plain, written = run(VALUES), run(source)
    for arguments, given in ((("a",), {}), (("a", [1, 2]), {}), ((), {"name": "a", "share": 1.0, "numbers": [3]})):
        assert repr(written["Value"](*arguments, **given)) == repr(plain["Value"](*arguments, **given))
    assert written["Value"]("a") == written["Value"]("a") and written["Value"]("a", [4]).total == 4
    assert repr(written["Nothing"]()) == repr(plain["Nothing"]()) and written["Own"]().x == 3
    assert written["Value"]("a").numbers is not written["Value"]("a").numbers


def results(root: Path, out: Path) -> dict[str, bytes]:
    """What a run of ``root``'s package writes, by file; the report holds the time that it took."""
    program = "import talaria.sim.kernel as kernel, sys; print(kernel.__file__, file=sys.stderr); from talaria.cli.main import main; main()"
    options = ["--scenario", "paper-tp8", "--seeds", "2", "--decisions", "--timeline", "--out", str(out)]
    command = [sys.executable, "-c", program, "run", *options]
    environment = os.environ | {"PYTHONPATH": str(root)}
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.splitlines()[0].endswith(".py") == (root == REPOSITORY), finished.stderr
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "report.html"}


@pytest.mark.full
def test_compiled_modules_give_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("mypyc")
    pytest.importorskip("setuptools")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    include = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["include"]
    assert len(hook().compiled(REPOSITORY, include, tmp_path)) == len(include) + 1
    assert results(tmp_path, tmp_path / "compiled") == results(REPOSITORY, tmp_path / "pure")
