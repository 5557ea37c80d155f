"""Entry points of SGLang's plugin groups: every process of an engine that an instance agent started runs ``load`` first."""

from __future__ import annotations

import os
from typing import Final

from talaria.gpu.protocol import arena, memory
from talaria.gpu.protocol.engine import SOCKET_VARIABLE

_ON_CPU: Final = "SGLANG_USE_CPU_ENGINE"
"""Environment variable that makes SGLang run on the CPU, whatever there is."""


def load() -> None:
    """Installs the hooks. An SGLang server that no agent started is left alone.

    Raises SystemExit with one line where this SGLang does not fit; any other exception SGLang would log and start without the hooks.
    """
    if SOCKET_VARIABLE not in os.environ:
        return
    try:
        from talaria.gpu import compat
        from talaria.gpu.hooks import hold, offload, pause, resume, stop, telemetry, tokenise

        kept: list[compat.Hook] = []
        if memory.SOCKET_VARIABLE in os.environ:
            from talaria.gpu.hooks import linker

            kept += linker.HOOKS
        if arena.SOCKET_VARIABLE in os.environ:
            from talaria.gpu.hooks import arena as arena_hooks
            from talaria.gpu.hooks import staging

            kept += [*arena_hooks.HOOKS, *staging.HOOKS]
        compat.install([*kept, *hold.HOOKS, *offload.HOOKS, *tokenise.HOOKS, *resume.HOOKS, *stop.HOOKS, *pause.HOOKS, *telemetry.HOOKS])
    except Exception as error:
        raise SystemExit(f"talaria: the hooks cannot be installed: {error!r}") from error


def platform() -> str | None:
    """Which of our platforms takes the place of SGLang's own; none where the engine's memory is its own."""
    if arena.SOCKET_VARIABLE not in os.environ:
        return None
    return "talaria.gpu.hooks.platform:" + ("CpuArenaPlatform" if os.environ.get(_ON_CPU) == "1" else "CudaArenaPlatform")
