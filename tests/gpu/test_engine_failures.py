"""What goes wrong while an engine starts or switches leaves nothing behind, and says so in the one way that its users catch."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from talaria.gpu import config
from talaria.gpu.engine import engine as module
from talaria.gpu.engine.engine import Engine, EngineState
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.engine.guard import IllegalStep
from talaria.gpu.engine.holds import HoldServer


def an_engine(log_dir: Path, downs: list[str]) -> Engine:
    model, instance = config.Model(path="org/model", kv_tokens=1000), config.Instance(name="g0", models=("m",), max_running=4)
    holds = HoldServer(lambda model, message: None, lambda model: None)
    holds.path = log_dir / "holds"
    return Engine("m", model, instance, config.Engine(log_dir=str(log_dir)), holds, lambda model, why: downs.append(why))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines get their directories."""
    place = tmp_path / "places"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_log_that_cannot_be_written_leaves_no_directory(tmp_path: Path, places: Path) -> None:
    (tmp_path / "file").touch()
    engine = an_engine(tmp_path / "file" / "logs", [])
    with pytest.raises(EngineFailed, match="does not start"):
        asyncio.run(engine.start())
    assert engine.state is EngineState.FAILED and not list(places.iterdir())


def test_a_run_that_cannot_be_followed_leaves_no_process(tmp_path: Path, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []

    class Started:
        @classmethod
        async def start(cls, *_: Any) -> Started:
            return cls()

        async def kill(self) -> None:
            killed.append(self)

    def broken(*_: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(module.process, "Process", Started)
    monkeypatch.setattr(module, "KvEvents", broken)
    monkeypatch.setattr(module, "Control", lambda *_: None)
    with pytest.raises(EngineFailed, match="too many open files"):
        asyncio.run(an_engine(tmp_path, []).start())
    assert len(killed) == 1 and not list(places.iterdir())


def test_an_illegal_step_is_a_failed_engine(tmp_path: Path) -> None:
    downs = list[str]()
    engine = an_engine(tmp_path, downs)

    async def refuse() -> None:
        raise IllegalStep("pause of an engine that is paused")

    async def end() -> None:
        pass

    async def park() -> None:
        log = tmp_path / "log"  # there is none, or not any more
        engine._run = SimpleNamespace(control=SimpleNamespace(pause=refuse), end=end, log=log)  # type: ignore[assignment]
        engine.state = EngineState.ACTIVE
        await engine.park()

    with pytest.raises(EngineFailed, match="pause of an engine that is paused"):
        asyncio.run(park())
    assert engine.state is EngineState.FAILED and len(downs) == 1
