"""When an instance's slot scheduler was in which phase, for timelines."""

from __future__ import annotations

from typing import Protocol


class _Told(Protocol):
    def phase(self, name: str, model: str, started_s: float, ended_s: float) -> None: ...


class PhaseWatch:
    """Tells ``host`` of each phase when it is over."""

    def __init__(self, host: _Told, now_s: float) -> None:
        self._host = host
        self._name, self._since_s = "idle", now_s
        self._model: str | None = None

    def see(self, name: str, model: str | None, now_s: float) -> None:
        if name == self._name:
            return
        if self._name != "idle" and self._model is not None:
            self._host.phase(self._name, self._model, self._since_s, now_s)
        self._name, self._since_s, self._model = name, now_s, model
