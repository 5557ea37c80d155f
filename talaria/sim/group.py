"""The models of one simulated TP group: which is active, which is being staged, and the switch under way (SPEC §5.3, §5.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from talaria.policy.instance import EngineView, ModelView
from talaria.policy.snapshot import ABSENT, ACTIVE, PARKED, STAGED
from talaria.sim.engine import Run
from talaria.sim.host import Ground, LogicalSwitch
from talaria.sim.kernel import Alarm, Kernel
from talaria.sim.memory import InstanceMemory


class Group:
    """Keeps the view's residencies current. ``switched`` hears of a switch when its target is active."""

    def __init__(
        self, env: Kernel, view: EngineView, memory: InstanceMemory, ground: Ground, switched: Callable[[LogicalSwitch], None]
    ) -> None:
        self.staged: ModelView | None = None
        """The model whose weights are being staged."""
        self.target: str | None = None
        """Of the switch under way."""
        self._env, self._view, self._memory, self._ground = env, view, memory, ground
        self._switched = switched
        self._alarm: Alarm | None = None

    def open_at_start(self, models: tuple[str, ...]) -> None:
        """Models that are resident when the run starts; the first is active."""
        for name in models:
            self._memory.open(name)
            self._view.models[name].residency = PARKED
        if models:
            self._activate(models[0])

    def _activate(self, name: str) -> None:
        self._memory.activate(name)
        self._view.active = name
        self._view.models[name].residency = ACTIVE

    def close(self, name: str) -> None:
        self._view.models[name].residency = ABSENT
        self._memory.close(name)

    def stage(self, name: str, rate: float) -> None:
        self._memory.stage(name, rate, self._env.now)
        self._show_staged(name)

    def unstage(self) -> None:
        self._memory.unstage()
        self._show_staged(None)

    def _show_staged(self, target: str | None) -> None:
        """Of the parked models only ``target`` is staged from now on (SPEC §5.6); nothing of it is there yet."""
        self.staged = self._view.models[target] if target is not None else None
        for name, model in self._view.models.items():
            if model.residency is PARKED or model.residency is STAGED:
                model.residency = STAGED if name == target else PARKED
                model.coverage = 0.0

    def switch_to(self, target: str, held: list[Run]) -> None:
        """Tear the active model down, with the calls ``held`` of it, then let the five phases pass."""
        now_s, source = self._env.now, self._view.active
        plan = self._memory.plan_switch(source, target, held, self._ground.timing[target].open_s, now_s)
        self.staged = None
        phases = self._ground.switch.slowest_s(plan)
        record = LogicalSwitch(source, target, now_s, phases, plan.path, plan.coverage, plan.dirty, plan.d2d_bytes, plan.h2d_bytes)
        if source is not None and self._view.models[source].residency is ACTIVE:  # else it was closed to make room
            self._view.models[source].residency = PARKED
        self.target, self._view.active = target, None
        self._alarm = self._env.alarm(sum(phases), self._finish, record)

    def _finish(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        self._alarm = self.target = None
        record = cast(LogicalSwitch, alarm.value)
        self._activate(record.target)
        model = self._view.models[record.target]
        model.coverage = 0.0
        if model.leases:
            now_s = self._env.now
            model.leases = {key: times for key, times in model.leases.items() if times[1] > now_s}
        self._show_staged(None)
        self._switched(record)

    def fail(self) -> str:
        """The switch under way does not succeed, and no model is active afterwards; its target."""
        assert self._alarm is not None
        record = cast(LogicalSwitch, self._alarm.value)
        self._alarm = self.target = None
        self._show_staged(None)
        return record.target

    def crash(self) -> None:
        """The engine is gone, and with it what was on the device and the switch under way."""
        self._alarm = self.target = None
        for model in self._view.models.values():
            if model.residency is not ABSENT:
                model.residency = PARKED
        self._memory.crash()
        self._view.active = None
        self._show_staged(None)
