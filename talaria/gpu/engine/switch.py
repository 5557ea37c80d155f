"""From one model to another on the same GPUs (SPEC §5.4)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from talaria.gpu.engine.engine import Engine, EngineState
from talaria.gpu.engine.errors import EngineFailed, SwitchFailed
from talaria.gpu.memory.arenas import RankTimes
from talaria.substrate.switch import merge_ranks


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """One logical switch or open."""

    started_s: float
    """``time.monotonic()``."""
    phases_s: tuple[float, float, float, float, float]
    """Teardown of the source, then weights, KV pool, graphs and publishing of the target, an open counting as weights: of the slowest rank
    of an arena, with what else the switch took added to publishing; else between answers of their servers."""
    path: str
    """``d2d``, ``partial``, ``h2d``, or ``open`` where the target had no process."""
    coverage: float = 0.0
    """Share of the weights that was on the device already, on the rank that had least."""
    dirty: float = 0.0
    """Share of them that had been and was overwritten, on the rank that lost most."""
    d2d_bytes: int = 0
    h2d_bytes: int | None = None
    """Of the rank that moved most; None: SGLang copied all weights."""
    staging_bytes_per_s: float = 0.0
    """At which a rank staged before; 0: nothing was."""


async def switch(source: Engine | None, target: Engine) -> SwitchTimes:
    """Park ``source`` (None: nobody is active), then make ``target`` active, by a start where it is absent or failed.

    Raises Busy where the source still runs calls: it goes on, nothing has changed. Raises SwitchFailed otherwise: an engine that
    failed is FAILED, and if it was the target, the source is PARKED and can be activated again.
    """
    started_s = time.monotonic()
    try:
        teardown_s = await source.park() if source is not None else 0.0
        if target.state is EngineState.PARKED:
            activated = await target.activate()
            if activated.ranks:
                return of_ranks(started_s, activated.ranks)
            return SwitchTimes(started_s, (teardown_s, *activated.phases_s), "h2d")
        opened_s = time.monotonic()
        await target.start()
        return SwitchTimes(started_s, (teardown_s, time.monotonic() - opened_s, 0.0, 0.0, 0.0), "open")
    except EngineFailed as error:
        raise SwitchFailed(str(error), error.model) from error


def of_ranks(started_s: float, ranks: Sequence[RankTimes]) -> SwitchTimes:
    """One switch: as slow as its slowest rank, as cold as its coldest (SPEC §5.4)."""
    logical, took_s = merge_ranks([rank.record for rank in ranks]), time.monotonic() - started_s
    teardown_s, weights_s, pool_s, graphs_s, publish_s = logical.phases_s
    weights = [max(1, rank.record.d2d_bytes + rank.record.h2d_bytes) for rank in ranks]
    return SwitchTimes(
        started_s, (teardown_s, weights_s, pool_s, graphs_s, publish_s + max(0.0, took_s - logical.total_s)), logical.path,
        coverage=min(rank.record.d2d_bytes / nbytes for rank, nbytes in zip(ranks, weights, strict=True)),
        dirty=max(rank.dirty_bytes / nbytes for rank, nbytes in zip(ranks, weights, strict=True)),
        d2d_bytes=logical.d2d_bytes, h2d_bytes=logical.h2d_bytes,
    )  # fmt: skip
