"""``talaria-sim`` that stands still in the first replay of its third batch, and says so with a file: there it can be interrupted."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from talaria.cli.main import main
from talaria.tune import search
from talaria.tune.search import BATCH
from talaria.tune.task import Measured, Replay, measure

started: list[str] = []


def replayed(replay: Replay) -> Measured:
    started.append(str(replay.knobs))
    if len(set(started)) == 2 * BATCH + 1:
        Path("in-a-trial").touch()
        threading.Event().wait(300)
    return measure(replay)


signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have left it ignored
search.measure = replayed  # type: ignore[attr-defined]
main(sys.argv[1:])
