"""One of several processes on a study, with short pulses; ``python -m tests.tune.worker STORAGE TRIALS [MARK]``.

With MARK it stands still in its third replay, after it has made that file: whoever waits for the file can kill it in a trial.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from talaria.sim.parallel import Pool
from talaria.tune import search
from talaria.tune.beats import Pulse
from talaria.tune.search import Search
from talaria.tune.storage import opened
from talaria.tune.task import Measured, Replay, measure
from tests.tune.small import small_task

PULSE = Pulse(every_s=0.2, grace_s=8.0)


def stands_still(mark: str) -> None:
    """From now on the third replay of this process does not end."""
    calls = iter(range(1, 1_000_000))

    def replayed(replay: Replay) -> Measured:
        if next(calls) == 3:
            Path(mark).touch()
            threading.Event().wait()
        return measure(replay)

    search.measure = replayed  # type: ignore[attr-defined]


def main(url: str, trials: str, mark: str = "") -> None:
    if mark:
        stands_still(mark)
    with opened(url) as storage, Pool(1000, 1) as pool:
        running = Search(small_task(), storage, "shared", int(trials), sampler="tpe", seed=0, pulse=PULSE)
        running.run(pool, lambda finished: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
