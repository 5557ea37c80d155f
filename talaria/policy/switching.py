"""The switch that an instance is in, and the models that must sit out after one failed."""

from __future__ import annotations

from talaria.policy.instance import Close, Command, EngineView, Open, Switch, SwitchDone, SwitchFailed
from talaria.policy.rounds import activation_s
from talaria.policy.snapshot import ABSENT

_MIN_RETRY_S = 1.0


class Switching:
    """At most one switch at a time. ``predicted_s`` is the policy's estimate of the last one that began."""

    def __init__(self) -> None:
        self.target: str | None = None
        self.predicted_s = 0.0
        self._started_s = 0.0
        self._retry_s: dict[str, float] = {}

    def begin(self, view: EngineView, name: str, now_s: float, commands: list[Command]) -> None:
        """Command the switch to ``name``, or its opening, for which a full instance closes another model first."""
        absent = view.models[name].residency is ABSENT
        if absent:
            resident = [other for other, model in view.models.items() if model.residency is not ABSENT]
            if len(resident) >= view.capabilities.max_resident_models:
                commands.append(Close(_victim(view, resident, now_s)))
        self.target = name
        self.predicted_s = activation_s(view, name)
        self._started_s = now_s
        commands.append(Open(name) if absent else Switch(name))

    def end(self, event: SwitchDone | SwitchFailed, now_s: float) -> float | None:
        """Seconds that the switch under way took; None for a report about any other, which comes too late to matter.

        After a failure the model sits out for as long as the switch was predicted to take, at least a second.
        """
        if event.model != self.target:
            return None
        self.target = None
        if isinstance(event, SwitchFailed):
            self._retry_s[event.model] = now_s + max(_MIN_RETRY_S, self.predicted_s)
        return now_s - self._started_s

    def sits_out(self, name: str, now_s: float) -> bool:
        return self._retry_s.get(name, 0.0) > now_s

    def retries_s(self, now_s: float) -> list[float]:
        """When models that sit out may be tried again."""
        return [at_s for at_s in self._retry_s.values() if at_s > now_s]


def _victim(view: EngineView, resident: list[str], now_s: float) -> str:
    """The resident model with the least to do here: calls first, then live leases, then registration order."""

    def claims(name: str) -> tuple[int, int]:
        model = view.models[name]
        live = sum(1 for _, expires_s in model.leases.values() if expires_s > now_s)
        return len(model.waiting) + len(model.held), live

    return min(resident, key=claims)
