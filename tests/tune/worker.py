"""One of several processes on a study, with short pulses; ``python -m tests.tune.worker tune|sweep STORAGE [MARK]``.

With MARK it stands still in its third replay, after it has made that file: whoever waits for the file can kill it in a trial.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from talaria.sim import batch
from talaria.sim.parallel import Pool
from talaria.tune import search
from talaria.tune.beats import Pulse
from talaria.tune.search import Search
from talaria.tune.storage import opened
from talaria.tune.sweep import Axis
from tests.tune.small import small_task, swept

TRIALS = 16
AXES = [Axis("tau", (0.0, 0.5, 1.0, 2.0, 5.0)), Axis("linger", (0.0, 1.5))]
SEEDS = 2
PULSE = Pulse(every_s=0.2, grace_s=8.0)


def standing_still(work: Callable[..., Any], mark: str) -> Callable[..., Any]:
    """``work``, the third call of which does not end."""
    calls = iter(range(1, 1_000_000))

    def worked(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == 3:
            Path(mark).touch()
            threading.Event().wait()
        return work(*arguments, **keywords)

    return worked


def main(kind: str, url: str, mark: str = "") -> None:
    if mark:
        search.measure = standing_still(search.measure, mark)  # type: ignore[attr-defined]
        batch.simulate = standing_still(batch.simulate, mark)  # type: ignore[attr-defined]
    with opened(url) as storage, Pool(1000, 1) as pool:
        if kind == "sweep":
            swept(AXES, SEEDS, storage, pulse=PULSE)
            return
        running = Search(small_task(), storage, "shared", TRIALS, sampler="tpe", seed=0, pulse=PULSE)
        running.run(pool, lambda finished: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
