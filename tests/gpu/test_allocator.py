"""Our allocator of KV pages is SGLang's own in all that SGLang sees of it."""

from __future__ import annotations

import os
import subprocess

import pytest

from talaria.gpu import config
from tests.gpu.conftest import CPU


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_it_gives_as_many_pages_as_sglangs_and_always_the_lowest(cpu_engine: config.Engine, seed: int) -> None:
    assert cpu_engine.python is not None
    environment = {**os.environ, **cpu_engine.environment}
    ran = subprocess.run(
        [cpu_engine.python, str(CPU / "allocations.py"), str(seed)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0 and ran.stdout.endswith("alike\n"), ran.stderr
