"""What tests of the host pool must not leave behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.gpu.agent_process import descendants
from tests.gpu.memory.leaks import descriptors, mappings


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No descriptor, no mapping and no process."""
    before = descriptors(), mappings(), set(descendants(os.getpid()))
    yield
    gc.collect()
    assert descriptors() <= before[0]
    assert mappings() <= before[1]
    assert set(descendants(os.getpid())) <= before[2]
