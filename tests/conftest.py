"""Fixtures for every test. Hypothesis runs without deadlines and derandomised: no verdict may depend on machine speed or luck."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The material that lies beside the repository: specification, public traces, measured points."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the shared/ folder beside the repository (traces, measured points)")
    return path
