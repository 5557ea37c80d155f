"""Shows in ``/server_info`` that the hooks are at work in the scheduler, and which protocol they speak."""

from __future__ import annotations

from typing import Any, Final

from talaria.gpu import compat
from talaria.gpu.hooks import pause, resume, stop
from talaria.gpu.protocol.engine import ABI

ABI_KEY: Final = "talaria_abi"


def _tell(answer: Any, *_arguments: Any, **_named: Any) -> None:
    if not compat.unapplied([*HOOKS, *resume.HOOKS, *stop.HOOKS, *pause.HOOKS]):
        answer.internal_state[ABI_KEY] = ABI


HOOKS: Final = (compat.Hook(compat.INTERNAL_STATE, "after", _tell),)
