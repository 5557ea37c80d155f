"""From one model to another on the same GPUs (SPEC §5.4)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from talaria.gpu.engine.engine import Engine, EngineState
from talaria.gpu.engine.errors import EngineFailed, SwitchFailed


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """One logical switch or open."""

    started_s: float
    """``time.monotonic()``."""
    phases_s: tuple[float, float, float, float, float]
    """Teardown of the source, then weights, KV pool, graphs and publishing of the target, between answers of their servers: by the first
    rank's clock, which has waited for the slowest one wherever SGLang has a barrier (weights). An open counts as weights."""
    path: str
    """``h2d``, or ``open`` where the target had no process."""


async def switch(source: Engine | None, target: Engine) -> SwitchTimes:
    """Park ``source`` (None: nobody is active), then make ``target`` active, by a start where it is absent or failed.

    Raises Busy where the source still runs calls: it goes on, nothing has changed. Raises SwitchFailed otherwise: an engine that
    failed is FAILED, and if it was the target, the source is PARKED and can be activated again.
    """
    started_s = time.monotonic()
    try:
        teardown_s = await source.park() if source is not None else 0.0
        if target.state is EngineState.PARKED:
            weights_s, pool_s, graphs_s, publish_s = await target.activate()
            return SwitchTimes(started_s, (teardown_s, weights_s, pool_s, graphs_s, publish_s), "h2d")
        opened_s = time.monotonic()
        await target.start()
        return SwitchTimes(started_s, (teardown_s, time.monotonic() - opened_s, 0.0, 0.0, 0.0), "open")
    except EngineFailed as error:
        raise SwitchFailed(str(error), error.model) from error
