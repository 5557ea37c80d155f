"""What is active on the devices of an instance, and how that changes: switches, deaths of engines, an administrator's wishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from talaria.gpu.agent.alarm import Alarm
from talaria.gpu.agent.calls import AgentCall
from talaria.gpu.agent.decode import DecodeClock
from talaria.gpu.agent.host import Engines, Host, Sizes, Staged
from talaria.gpu.agent.leases import Leases
from talaria.gpu.agent.memory import PrefixMemory
from talaria.gpu.engine.errors import EngineFailed
from talaria.gpu.engine.switch import SwitchTimes
from talaria.gpu.protocol.agent import Switched
from talaria.gpu.protocol.engine import Hello
from talaria.policy.instance import Cancelled, EngineDown, EngineUp, EngineView, Event, SwitchDone, SwitchFailed, Tick
from talaria.policy.snapshot import Capabilities, Residency

MOST_ATTEMPTS = 3
"""Engines that may die under one call before it is given up: it may be what kills them."""
_log = logging.getLogger("talaria.agent")


class Calls(Protocol):
    """The calls of the instance and the ear of its slot scheduler."""

    view: EngineView
    runs: dict[int, AgentCall]
    capabilities: Capabilities
    clock: Callable[[], float]
    decode: DecodeClock
    memory: PrefixMemory
    leases: Leases
    alarm: Alarm
    heard_s: dict[str, float]
    """When an engine last said something, by model."""
    limits: dict[str, Hello]
    """What engines that were up have said of themselves, by model."""

    def happened(self, event: Event) -> None: ...

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]: ...

    def post(self, run: AgentCall) -> None: ...

    def end_early(self, run: AgentCall, status: int, why: str) -> None: ...

    def arrive(self, run: AgentCall) -> None: ...

    def leave(self, run: AgentCall, outcome: str, why: str) -> None: ...


class Group:
    """The engines of one instance, one per model, as commands, faults and administrators change them."""

    def __init__(self, calls: Calls, engines: Engines, host: Host, sizes: Sizes) -> None:
        self._calls = calls
        self._engines = engines
        self._host = host
        self._sizes = sizes
        self._switch: tuple[str | None, str] | None = None
        """(source, target) of the switch or open under way."""
        self._switch_task: asyncio.Task[None] | None = None
        self._staging: tuple[str, float] | None = None
        """What is being staged, since when."""
        self._closing: list[str] = []
        self._shutting: set[asyncio.Task[None]] = set()
        """Parked engines that an administrator has closed, while they end."""
        self._declined = ""
        self._down: set[str] = set()
        """Models whose engine died and is not yet taken away."""
        self._asked: dict[str, bool] = {}
        """By model: an administrator wants it open, once (True), or closed until said otherwise, whoever opens it meanwhile (False)."""
        self._shut = False
        """An administrator has closed the one model of a hot instance: it takes no calls until that is open again, since its scheduler
        would open it at once."""

    @property
    def target(self) -> str | None:
        """The model that a switch or open under way makes active."""
        return None if self._switch is None else self._switch[1]

    @property
    def busy(self) -> bool:
        """A switch is under way, or something to recover from."""
        return bool(self._switch or self._down)

    def forget_wishes(self) -> None:
        self._asked.clear()
        if self._shut:
            self.administer(next(iter(self._calls.view.models)), is_open=True)

    # --- commands -------------------------------------------------------------------------------------------------------

    def close(self, model: str) -> None:
        """Calls that wait are posted again when the model comes back; calls in flight would lose what they have: not now."""
        if self._calls.view.models[model].held:
            self._declined = model
            return
        self._closing.append(model)
        self._calls.view.models[model].residency = Residency.ABSENT

    def open(self, model: str) -> None:
        declined, self._declined = self._declined, ""
        if declined:
            self._calls.happened(SwitchFailed(model, f"{declined} has calls in flight and cannot make room"))
        else:
            self.switch_to(model)

    def switch_to(self, target: str) -> None:
        self._end_staging()
        source = self._calls.view.active
        assert not any(run.granted for run in self._calls.runs.values()), "a switch met a busy engine"
        if source is not None:
            self._calls.memory.lose(source)
            if self._calls.view.models[source].residency is Residency.ACTIVE:  # else it is closed to make room
                self._calls.view.models[source].residency = Residency.PARKED
        self._calls.view.active = None
        closing, self._closing = self._closing, []
        for model in closing:
            self._forget_posts(model)
        self._switch = (source, target)
        self._switch_task = self._calls.spawn(self._do_switch(source, target, closing))

    async def _do_switch(self, source: str | None, target: str, closing: list[str]) -> None:
        engines, started_s = self._engines, self._calls.clock()
        try:
            await asyncio.gather(*self._shutting)
            for model in closing:
                await engines.close(model)
            source = None if source in closing else source
            outcome: SwitchTimes | EngineFailed = await engines.switch(source, target)
        except EngineFailed as error:
            outcome = error
        finally:
            self._switch = None
        if isinstance(outcome, EngineFailed):
            if not self._down:
                self.show_residency()
            self._calls.happened(SwitchFailed(target, str(outcome)))
            self._refuse_waiting(target)
        elif not self._down:  # else it came too late: what has died meanwhile took the round with it
            self._switched(source, target, started_s, outcome)

    def _switched(self, source: str | None, target: str, started_s: float, times: SwitchTimes) -> None:
        self.show_residency()
        model, now_s = self._calls.view.models[target], self._calls.clock()
        model.leases = {key: lease for key, lease in model.leases.items() if lease[1] > now_s}
        self._calls.decode.show(model)
        self._post_waiting(target)
        self._host.switched(
            Switched(
                source=source, target=target, started_s=started_s, phases_s=times.phases_s, path=times.path,
                coverage=times.coverage, dirty=times.dirty, d2d_bytes=times.d2d_bytes,
                h2d_bytes=self._sizes.weight_bytes[target] if times.h2d_bytes is None else times.h2d_bytes,
                staging_bytes_per_s=times.staging_bytes_per_s,
            )
        )  # fmt: skip
        self._calls.happened(SwitchDone(target, times.phases_s, times.path))
        self._host.slot_opened()

    def stage(self, model: str, share: float) -> None:
        """Of the parked models only this one is staged from now on (SPEC §5.6)."""
        self._end_staging()
        self._staging = model, self._calls.clock()
        self._engines.stage(model, share)
        self._calls.view.models[model].residency = Residency.STAGED

    def unstage(self, model: str) -> None:
        self._end_staging()
        self._engines.unstage()
        view = self._calls.view.models[model]
        view.coverage = 0.0
        if view.residency is Residency.STAGED:
            view.residency = Residency.PARKED

    def _end_staging(self) -> None:
        """For timelines."""
        if self._staging is not None:
            (model, since_s), self._staging = self._staging, None
            self._host.phase("staging", model, since_s, self._calls.clock())

    def staged(self) -> Staged:
        """As it is now, and so that the scheduler's switch estimates rest on it (SPEC §4.2)."""
        staged = self._engines.staged()
        if staged.target:
            self._calls.view.models[staged.target].coverage = staged.coverage
        return staged

    def show_residency(self) -> None:
        """The models as their engines stand now."""
        self._calls.view.active = None
        for name, model in self._calls.view.models.items():
            model.residency = self._engines.residency(name)
            model.coverage = 0.0
            if model.residency is not Residency.ABSENT:
                self._calls.limits[name] = self._engines.limits(name)
            if model.residency is Residency.ACTIVE:
                self._calls.view.active = name

    # --- calls of a model --------------------------------------------------------------------------------------------

    def _refuse_waiting(self, model: str) -> None:
        """Calls do not wait for an engine that does not start."""
        why = None if self._engines.alive(model) else self._engines.refusal(model)
        if why is not None:
            for call_id in list(self._calls.view.models[model].waiting):
                self._calls.end_early(self._calls.runs[call_id], 502, why)

    def _post_waiting(self, model: str) -> None:
        for call_id in self._calls.view.models[model].waiting:
            run = self._calls.runs[call_id]
            if not run.posted:
                self._calls.post(run)

    def _forget_posts(self, model: str) -> None:
        """The engine of the model goes away with all that it holds."""
        for run in [run for run in self._calls.runs.values() if run.model == model]:
            run.start_over()
            if not run.arrived:
                self._calls.arrive(run)

    def _take_back(self, model: str) -> list[AgentCall]:
        """Calls of a dead engine wait again, in order of arrival; returns those that cannot be tried again, out of the view."""
        view, lost, waiting = self._calls.view.models[model], [], []
        for run in [run for run in self._calls.runs.values() if run.model == model]:
            self._calls.decode.ended(run.id)
            if run.posted and (run.dropped or run.client.began or run.attempts >= MOST_ATTEMPTS):
                lost.append(run)
                continue
            run.start_over()
            if run.arrived:
                waiting.append(run.view)
        view.running.clear()
        view.held.clear()
        waiting.sort(key=lambda item: (item.arrived_s, item.call.id))
        view.waiting = {item.call.id: item for item in waiting}
        return lost

    # --- faults ---------------------------------------------------------------------------------------------------------

    def died(self, model: str, why: str) -> None:
        """The engine is gone. Calls whose client was sent nothing wait again; the others end with an error.

        One that was only parked takes nothing else with it: its model is absent now. The active one, or one in a switch, leaves
        the group without a model until what is left of it is taken away.
        """
        self._calls.leases.settle_all()
        involved = model == self._calls.view.active or (self._switch is not None and model in self._switch)
        lost = self._take_back(model)
        self._calls.view.models[model].residency = Residency.ABSENT
        self._calls.memory.lose(model)
        if involved:
            self._down.add(model)
            self._calls.alarm.set(None)
            self._calls.view.active = None
            self._calls.view.healthy = False
            self._calls.happened(EngineDown(0))
        for run in lost:
            run.client.fail(502, why)
            self._calls.leave(run, "failed", why)
            if run.arrived:
                self._calls.happened(Cancelled(run.id))
        if involved:
            self._host.health_changed()
        else:
            self._calls.happened(Tick())
        self._calls.spawn(self._recover(model))

    async def _recover(self, model: str) -> None:
        """The group is healthy again when a switch that the death met is over. Its scheduler then opens what it needs, and other models
        do not wait for the back-off of the one that died."""
        if self._switch_task is not None:
            await asyncio.wait({self._switch_task})
        if len(self._calls.view.models) == 1:
            await self._engines.reap(model)
        for run in [run for run in self._calls.runs.values() if run.model == model and not run.arrived]:
            self._calls.arrive(run)
        self._up_again(model)

    def hung(self, hang_s: float) -> str | None:
        """A model whose engine runs calls and has said nothing for ``hang_s``; it is killed."""
        active = self._calls.view.active
        if active is None or not any(run.granted for run in self._calls.runs.values()):
            return None
        if self._calls.clock() - self._calls.heard_s.get(active, 0.0) <= hang_s:
            return None
        self._engines.kill(active, f"it has said nothing for {hang_s:g} s")
        return active

    # --- what an administrator asks for ----------------------------------------------------------------------------

    def administer(self, model: str, *, is_open: bool) -> None:
        """Start the model's engine and make it active, or stop it. It waits for calls that are in the way."""
        if model in self._calls.view.models:
            self._asked[model] = is_open
            self.do_asked()

    def do_asked(self) -> None:
        """One wish at a time, where it meets neither a call nor a switch nor a fault; else at the next event."""
        if not self._asked or self._switch is not None or self._down or not (self._calls.view.healthy or self._shut):
            return
        for model, is_open in list(self._asked.items()):
            view = self._calls.view.models[model]
            if is_open == (view.residency is not Residency.ABSENT):
                if is_open:
                    del self._asked[model]
            elif is_open and self._resident_models >= self._calls.capabilities.max_resident_models:
                _log.error("event=open_refused model=%s why=the instance has %d models open, its limit", model, self._resident_models)
                del self._asked[model]
            elif not self._in_the_way(model, is_open=is_open):
                if is_open:
                    del self._asked[model]
                self._carry_out(model, is_open=is_open)
                return

    @property
    def _resident_models(self) -> int:
        return sum(model.residency is not Residency.ABSENT for model in self._calls.view.models.values())

    def _in_the_way(self, model: str, *, is_open: bool) -> bool:
        if is_open:
            return any(view.running for view in self._calls.view.models.values()) or any(run.granted for run in self._calls.runs.values())
        view = self._calls.view.models[model]
        return bool(view.waiting or view.running or view.held) or any(run.model == model for run in self._calls.runs.values())

    def _carry_out(self, model: str, *, is_open: bool) -> None:
        if is_open or model == self._calls.view.active:
            self._step_aside(model, is_open=is_open)
            return
        self._calls.view.models[model].residency = Residency.ABSENT
        task = self._calls.spawn(self._engines.close(model))
        self._shutting.add(task)
        task.add_done_callback(self._shutting.discard)
        self._calls.happened(Tick())

    def _step_aside(self, model: str, *, is_open: bool) -> None:
        """Change what is active behind a group that is down for its scheduler: its round is void, its calls are where they were."""
        source = self._calls.view.active
        self._down.add(model)
        if source is not None:
            self._calls.memory.lose(source)
        self._calls.alarm.set(None)
        self._calls.view.active, self._calls.view.healthy = None, False
        self._calls.happened(EngineDown(0))
        self._host.health_changed()
        self._calls.spawn(self._change(source, model, is_open=is_open))

    async def _change(self, source: str | None, model: str, *, is_open: bool) -> None:
        try:
            await asyncio.gather(*self._shutting)
            await (self._engines.switch(source, model) if is_open else self._engines.close(model))
            _log.info("event=%s model=%s", "opened" if is_open else "closed", model)
        except EngineFailed as error:
            _log.error("event=open_failed model=%s why=%s", model, error)
        self._shut = self._calls.capabilities.hot and self._asked.get(model) is False
        if self._shut:
            self._down.discard(model)
            self.show_residency()
            self._host.health_changed()
            self.do_asked()
        else:
            self._up_again(model)

    def _up_again(self, model: str) -> None:
        """Nothing of the model is in the way any more: the group is up, unless another one's engine has died meanwhile."""
        self._down.discard(model)
        if self._calls.view.healthy or self._down:
            return
        self.show_residency()
        self._calls.view.healthy = True
        self._calls.happened(EngineUp())
        self._host.health_changed()
