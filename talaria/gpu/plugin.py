"""Entry point of SGLang's plugin group: every process of an engine that an instance agent started runs ``load`` first."""

from __future__ import annotations

import os

from talaria.gpu.protocol import memory
from talaria.gpu.protocol.engine import SOCKET_VARIABLE


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
        compat.install([*kept, *hold.HOOKS, *offload.HOOKS, *tokenise.HOOKS, *resume.HOOKS, *stop.HOOKS, *pause.HOOKS, *telemetry.HOOKS])
    except Exception as error:
        raise SystemExit(f"talaria: the hooks cannot be installed: {error!r}") from error
