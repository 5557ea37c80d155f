"""Signs of life of running trials, and the return of those whose process died to the queue.

Optuna's own heartbeat belongs to ``Study.optimize`` on a database: with ask and tell, behind a gRPC proxy or in a journal there is
none. Here a running trial carries a counter that its process raises. Whoever sees it stand still for ``grace_s`` of its own clock
gives the trial back to the queue; clocks of several hosts are never compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from talaria.tune.places import BEAT, complete_returns, give_back

EVERY_S = 10.0
GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """How often a running trial gives a sign of life, and how long none is waited for."""

    every_s: float = EVERY_S
    grace_s: float = GRACE_S


class Beats:
    """Gives the signs of life of the trials between ``start`` and ``stop``, from a thread. A context manager."""

    def __init__(self, study: optuna.Study, pulse: Pulse) -> None:
        self._study, self._pulse = study, pulse
        self._running: dict[int, Trial] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._seen: dict[int, tuple[Any, float]] = {}

    def start(self, trial: Trial) -> None:
        """``trial`` runs here from now on."""
        with self._lock:
            self._running[trial.number] = trial

    def stop(self, trial: Trial) -> None:
        """``trial`` is told, or about to be."""
        with self._lock:
            self._running.pop(trial.number, None)

    def retry_dead(self, trials: Sequence[FrozenTrial]) -> bool:
        """Give back those of ``trials`` that run nowhere any more, and end what others began of that; whether there was a dead one."""
        complete_returns(self._study, trials)
        now_s = time.monotonic()
        running = {trial.number: trial for trial in trials if trial.state == TrialState.RUNNING}
        self._seen = {number: seen for number, seen in self._seen.items() if number in running}
        dead = []
        for number, trial in running.items():
            beat = trial.user_attrs.get(BEAT)
            last, since_s = self._seen.get(number, (None, now_s))
            if number not in self._seen or last != beat:
                self._seen[number] = (beat, now_s)
            elif now_s - since_s > self._pulse.grace_s and number not in self._running:
                dead.append(trial)
        return any([give_back(self._study, trial, died=True) for trial in dead])

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(self._pulse.every_s):
            count += 1
            with self._lock:
                running = list(self._running.values())
            for trial in running:
                with suppress(Exception):  # told in the meantime; or the storage is gone, which the main thread finds too
                    trial.set_user_attr(BEAT, count)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
