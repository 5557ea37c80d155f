"""An engine whose arena goes wrong on demand, for tests: ``FAULT [RANK]`` in the file that ``TALARIA_TEST_FAULT`` names.

``idle``: copies of weights do nothing. The others kill the rank: ``teardown`` before it lets go of the arena, ``hidden`` after that and
before it tells the agent, ``taken`` with the arena in hand, ``copied`` behind the copies of its weights.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from talaria.gpu.memory.cpu import CpuMover, CpuStream
from talaria.gpu.memory.mover import Copies, Stream


def fault() -> str:
    """For this rank, now."""
    from talaria.gpu import compat

    name, _, rank = Path(os.environ["TALARIA_TEST_FAULT"]).read_text().partition(" ")
    return name if not rank or compat.tp_rank()[0] == int(rank) else ""


class _Stream(CpuStream):
    def move(self, copies: Copies) -> None:
        if fault() != "idle":
            super().move(copies)


def _dies(point: str, function: Any, *, after: bool = False) -> Any:
    """``function``, at whose beginning or end the process is killed if the test wants it."""

    def dying(*arguments: Any, **named: Any) -> Any:
        if not after and fault() == point:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = function(*arguments, **named)
        if after and fault() == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return dying


def load() -> None:
    if "TALARIA_TEST_FAULT" not in os.environ:
        return
    from talaria.gpu.hooks import arena
    from talaria.gpu.memory import gather
    from talaria.gpu.memory.tenant import Tenant

    def stream(_mover: CpuMover) -> Stream:
        return _Stream()

    CpuMover.stream = stream  # type: ignore[method-assign]
    arena.Attached.teardown = _dies("teardown", arena.Attached.teardown)  # type: ignore[method-assign]
    Tenant.park = _dies("hidden", Tenant.park)  # type: ignore[method-assign]
    Tenant.take = _dies("taken", Tenant.take, after=True)  # type: ignore[method-assign]
    gather.gather = _dies("copied", gather.gather, after=True)
