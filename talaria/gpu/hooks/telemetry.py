"""Shows in ``/server_info`` that the hooks are at work in the scheduler, and which protocol they speak."""

from __future__ import annotations

import os
from typing import Any, Final

from talaria.gpu import compat, seams
from talaria.gpu.hooks import pause, resume, stop
from talaria.gpu.protocol import arena, memory
from talaria.gpu.protocol.engine import ABI

ABI_KEY: Final = "talaria_abi"


def _tell(answer: Any, *_arguments: Any, **_named: Any) -> None:
    needed = [*HOOKS, *resume.HOOKS, *stop.HOOKS, *pause.HOOKS]
    if memory.SOCKET_VARIABLE in os.environ:
        from talaria.gpu.hooks import linker

        needed += linker.HOOKS
    if arena.SOCKET_VARIABLE in os.environ:
        from talaria.gpu.hooks import arena as arena_hooks
        from talaria.gpu.hooks import staging

        needed += [*arena_hooks.HOOKS, *staging.HOOKS]
    if not compat.unapplied(needed):
        answer.internal_state[ABI_KEY] = ABI


HOOKS: Final = (compat.Hook(seams.INTERNAL_STATE, "after", _tell),)
