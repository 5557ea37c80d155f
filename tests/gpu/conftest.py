"""Fixtures for tests with real SGLang engines on the CPU: an interpreter that has SGLang, tiny models, and engine settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from talaria.gpu import config
from tests.gpu.holding import HeldEngine, running_engine

CPU = Path(__file__).resolve().parent / "cpu"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with real engines go to one worker of pytest-xdist: two engines at a time are enough for a machine."""
    for item in items:
        if "engine_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("engines"))


@pytest.fixture(scope="session")
def engine_python() -> str:
    """An interpreter that can run SGLang and this package: ``TALARIA_ENGINE_PYTHON``, or the running one."""
    python = os.environ.get("TALARIA_ENGINE_PYTHON", sys.executable)
    seen = "import importlib.util as found, sys; sys.exit(not (found.find_spec('sglang') and found.find_spec('talaria')))"
    if subprocess.run([python, "-c", seen], timeout=60).returncode != 0:
        pytest.skip("sglang is not installed: scripts/setup-engine")
    return python


@pytest.fixture(scope="session")
def tiny_models(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with tiny float32 models: ``qwen3``, ``llama``, and ``deepseek``, whose attention is latent."""
    directory = tmp_path_factory.mktemp("models")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        [engine_python, str(CPU / "models.py"), str(directory)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def large_model(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A float32 model of 200 MB and more."""
    directory = tmp_path_factory.mktemp("models")
    made = subprocess.run([engine_python, str(CPU / "models.py"), str(directory), "--large"], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    yield directory / "large"
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def cpu_engine(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> config.Engine:
    """How every engine of the tests runs: on the CPU, exactly, with one thread, from local files."""
    return config.Engine(
        python=engine_python,
        arguments=("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        environment={
            "PYTHONPATH": str(CPU / "standins"),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        },
        page_tokens=16,
        start_timeout_s=600.0,
        log_dir=str(tmp_path_factory.mktemp("engine-logs")),
    )


@pytest.fixture(scope="session")
def held_engine(cpu_engine: config.Engine, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldEngine]:
    """A real engine, for an agent of the test's own (``holding.desk``)."""
    with running_engine(cpu_engine, tiny_models / "qwen3", tmp_path_factory.mktemp("held")) as engine:
        yield engine
