"""When an instance's slot scheduler was in which phase, for timelines."""

from __future__ import annotations

from collections.abc import Callable


class PhaseWatch:
    """``told(phase, model, started_s, ended_s)`` hears of each phase when it is over."""

    def __init__(self, told: Callable[[str, str, float, float], None], now_s: float) -> None:
        self._told = told
        self._name, self._since_s = "idle", now_s
        self._model: str | None = None

    def see(self, name: str, model: str | None, now_s: float) -> None:
        if name == self._name:
            return
        if self._name != "idle" and self._model is not None:
            self._told(self._name, self._model, self._since_s, now_s)
        self._name, self._since_s, self._model = name, now_s, model
