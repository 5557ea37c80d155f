"""One simulated TP group: both faces of an instance over the ground truth of engine and memory.

The slot scheduler decides, this executes: commands become work of the engine, changes of memory, or a switch; what comes
of them goes back as events. The view is kept current in place, so that a step costs no copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import cast

from simpy.events import Event as KernelEvent

from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import (
    Admit,
    Arrived,
    CallView,
    Cancelled,
    Close,
    Command,
    EngineDown,
    EngineUp,
    EngineView,
    Event,
    FirstToken,
    LeaseChanged,
    ModelView,
    Open,
    Rejected,
    Report,
    RestoredShort,
    Resume,
    RoundSummary,
    SegmentEnded,
    Stage,
    Stop,
    Switch,
    SwitchDone,
    SwitchFailed,
    Tick,
    Unstage,
    Wait,
)  # fmt: skip
from talaria.policy.knobs import Knobs
from talaria.policy.phases import PhaseWatch
from talaria.policy.predict import Predictor, split_prompt
from talaria.policy.slots import SlotScheduler
from talaria.policy.snapshot import ABSENT, Capabilities, InstanceSnapshot, ModelSnapshot
from talaria.policy.timing import Timing
from talaria.sim.engine import Engine, Run
from talaria.sim.group import Group
from talaria.sim.host import CallTruth, Ground, Host, LogicalSwitch, StepLog
from talaria.sim.kernel import Alarm, Kernel
from talaria.sim.lines import LineBook
from talaria.sim.memory import NO_ROOM, TOO_LARGE, InstanceMemory


class SimInstance:
    """Implements ``policy.instance.Instance`` and hosts one ``SlotScheduler``."""

    def __init__(
        self, env: Kernel, index: int, name: str, capabilities: Capabilities, models: tuple[str, ...], ground: Ground,
        memory: InstanceMemory, beliefs: dict[str, Timing], knobs: Knobs, truth: Mapping[int, CallTruth], host: Host,
        log: StepLog | None = None, watched: bool = False,
    ) -> None:  # fmt: skip
        self.id = name
        self.index = index
        self.capabilities = capabilities
        self.memory = memory
        self.runs: dict[int, Run] = {}
        self.rounds = 0
        self.deadline_risk = 0
        self.changed = True
        """Since the last snapshot, made at ``published_s``."""
        self.published_s = 0.0
        self._env = env
        self._ground = ground
        self._truth = truth
        self._host = host
        self._log = log
        self._watched = watched
        self._phases = PhaseWatch(self._phase_over, 0.0)
        self._predictor = Predictor(beliefs, knobs.ewma_alpha)
        self._scheduler = SlotScheduler(knobs)
        self.view = EngineView(capabilities, {model: ModelView(beliefs[model], ABSENT) for model in models})
        self.view.hbm_capacity_bytes = memory.capacity_bytes
        self._group = Group(env, self.view, memory, ground, self._switched)
        self._engine = Engine(env, self._on_first_token, self._on_segment_end, self._decode_factor, macro=ground.macro)
        self._inbox: deque[Event] = deque()
        self._stepping = False
        self._tick: Alarm | None = None
        self._tick_at_s: float | None = None
        self._version = 0
        self._submitted = 0
        self._lines = LineBook(memory)
        self._look_again = False
        """What the view says of prefixes may be wrong: look before the next step."""

    # --- the router's face -----------------------------------------------------------------------------------------

    def submit(self, call: Call) -> KernelEvent:
        """Send ``call`` on its way; the event succeeds when it has ended. Its ground truth must be known beforehand."""
        truth = self._truth[call.id]
        run = Run(CallView(call, self._env.now), truth.node, truth.output_tokens, self._env.event())
        self.runs[call.id] = run
        if self._ground.call_overhead_s > 0.0:
            self._env.alarm(self._ground.call_overhead_s, self._on_the_way, run)
        else:
            self._arrive(run)
        return run.done

    def _on_the_way(self, alarm: Alarm) -> None:
        run = cast(Run, alarm.value)
        call_id = run.view.call.id
        if self.runs.get(call_id) is run:
            run.view.arrived_s = self._env.now
            self._arrive(run)
        else:  # cancelled meanwhile; its number is seen all the same
            self._submitted += 1

    def _arrive(self, run: Run) -> None:
        call = run.view.call
        run.arrived_round = self.rounds
        self._submitted += 1
        self._look(run)
        self.view.models[call.key.model].waiting[call.id] = run.view
        self._happened(Arrived(call))

    @property
    def largest_batch(self) -> Mapping[str, int]:
        """Most sequences in one decode step so far, by model."""
        return self._engine.largest_batch

    def healthy(self) -> bool:
        return self.view.healthy

    def lease_changed(self, key: LineKey, expires_s: float | None) -> None:
        """A grant is only noted (an event of the same instant follows). An early end is an event where a slot may linger for it.

        While calls run the scheduler looks again at their next boundary anyway.
        """
        if expires_s is not None:
            self.memory.protect(key, True)
            self.view.models[key.model].leases[key] = (self._env.now, expires_s)
        elif self._ground.call_overhead_s > 0.0:  # no sooner than the submission that it announces: a slot would close in its face
            self._env.alarm(self._ground.call_overhead_s, self._on_lease_end, (key, self.view.models[key.model].leases.get(key)))
        else:
            self._lease_over(key)

    def _on_lease_end(self, alarm: Alarm) -> None:
        key, lease = alarm.value
        if self.view.models[key.model].leases.get(key) is lease:  # else the line has a newer one
            self._lease_over(key)

    def _lease_over(self, key: LineKey) -> None:
        model = self.view.models[key.model]
        self.memory.protect(key, False)
        if model.leases.pop(key, (0.0, 0.0))[1] > self._env.now and key.model == self.view.active and not model.running:
            self._happened(LeaseChanged(key, None))

    def cancel(self, call_id: int) -> None:
        """The client went away: the call leaves every queue, its KV stays as far as it is computed."""
        run = self.runs[call_id]
        model = self.view.models[run.view.call.key.model]
        if call_id in model.running:
            self._engine.stop(run)
            run.output_tokens = 0  # whatever it has generated by the next boundary, that is its end
            return
        del self.runs[call_id]
        model.waiting.pop(call_id, None)
        if model.held.pop(call_id, None) is not None:
            self.memory.drop(run, self._env.now)
        self._cancelled(run)

    def _cancelled(self, run: Run) -> None:
        self._host.failed(run, self)
        self._happened(Cancelled(run.view.call.id))

    def snapshot(self) -> InstanceSnapshot:
        now_s = self._env.now
        self._note_evictions()
        self._version += 1
        slots, round_left_s, load_s = self._scheduler.outlook(self.view, now_s)
        memory = self.memory
        staged, staged_share = memory.staged(now_s)
        models = {}
        for name, model in self.view.models.items():
            timing = model.timing
            if name == self.view.active:
                coverage, activate_s, free_tokens = 1.0, 0.0, memory.free_tokens()
            else:
                coverage, free_tokens = staged_share if name == staged else 0.0, memory.pool_tokens[name]
                activate_s = timing.open_s if model.residency is ABSENT else timing.switch_s(coverage)
            next_slot_s, queued_work_s = slots[name]
            models[name] = ModelSnapshot(
                model.residency, coverage, len(model.waiting), len(model.running) + len(model.held), queued_work_s, next_slot_s,
                activate_s, free_tokens, memory.weight_bytes[name], timing,
            )  # fmt: skip
        self.changed = False
        self.published_s = now_s
        return InstanceSnapshot(
            instance=self.id, version=self._version, time_s=now_s, seen_seq=self._submitted, healthy=self.view.healthy,
            capabilities=self.capabilities, models=models, lines=self._lines.states(now_s), round_left_s=round_left_s, round_load_s=load_s,
            deadline_risk=self.deadline_risk, hbm_used_bytes=memory.used_bytes(), hbm_capacity_bytes=memory.capacity_bytes,
            slack_bytes=memory.slack_bytes(), host_kv_bytes=memory.host_kv_bytes(), host_weight_bytes=memory.host_weight_bytes,
        )  # fmt: skip

    def forget(self, key: LineKey) -> None:
        """A session has ended: its lines are of no interest any more, its cached KV lives until evicted."""
        if self._lines.forget(key):
            self.memory.forget(key)

    def _note_evictions(self) -> None:
        """Whatever was known of prefixes may be wrong once something was evicted."""
        if self.memory.evicted():
            self._lines.doubt_all()
            self._look_again = True

    # --- events and commands ---------------------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        """Give ``event`` to the scheduler and carry out what it commands; events that follow at once wait their turn."""
        if self._stepping:
            self._inbox.append(event)
            return
        self._stepping = True
        self.changed = True
        view, now_s = self.view, self._env.now
        try:
            while True:
                if self._look_again:
                    self._look_at_waiting()
                if view.active is not None and (model := view.models[view.active]).waiting:
                    model.free_kv_tokens = self.memory.free_tokens()
                if (staged := self._group.staged) is not None:  # what the scheduler's switch estimates rest on (SPEC §4.2)
                    staged.coverage = self.memory.staged(now_s)[1]
                commands = self._scheduler.step(event, view, now_s)
                if self._log is not None:
                    self._log(self.id, event, view, now_s, commands)
                until_s = None
                for command in commands:
                    if type(command) is Wait:
                        until_s = command.until_s
                    else:
                        self._execute(command)
                if until_s is None:
                    self._tick = self._tick_at_s = None
                elif until_s != self._tick_at_s:
                    self._wake_at(until_s)
                if self._watched:
                    self._phases.see(self._scheduler.phase(view), self._group.target or view.active, now_s)
                if not self._inbox:
                    break
                event = self._inbox.popleft()
        finally:
            self._stepping = False

    def _phase_over(self, phase: str, model: str, started_s: float, ended_s: float) -> None:
        self._host.phase(self, phase, model, started_s, ended_s)

    def _execute(self, command: Command) -> None:
        if type(command) is Admit:
            for call_id, grant in command.batch:
                self._admit(self.runs[call_id], grant, by_sp=command.phase == "SP")
        elif type(command) is Resume:
            self._resume(command.batch)
        elif type(command) is Stage:
            self._group.stage(command.model, command.rate)
        elif type(command) is Unstage:
            self._group.unstage()
        elif type(command) is Switch or type(command) is Open:
            self._begin_switch(command.model)
        elif type(command) is Report:
            self._report(command.round)
        elif type(command) is Close:
            self._group.close(command.model)
        elif type(command) is Stop:
            for call_id in command.call_ids:
                self._engine.stop(self.runs[call_id])

    def _wake_at(self, until_s: float) -> None:
        self._tick_at_s = until_s
        self._tick = self._env.alarm(max(0.0, until_s - self._env.now), self._on_tick)

    def _on_tick(self, alarm: Alarm) -> None:
        if alarm is self._tick:
            self._tick = self._tick_at_s = None
            self._happened(Tick())

    # --- calls -----------------------------------------------------------------------------------------------------

    def _look(self, run: Run) -> None:
        """Where the call's prefix is right now."""
        run.view.device_tokens, run.view.host_tokens = self.memory.prefix(run, self.view.active, self._env.now)

    def _look_at_waiting(self) -> None:
        self._look_again = False
        active = self.view.active
        if active is not None:
            for call_id in self.view.models[active].waiting:
                self._look(self.runs[call_id])

    def _admit(self, run: Run, grant: int, *, by_sp: bool) -> None:
        call, now_s = run.view.call, self._env.now
        model = self.view.models[call.key.model]
        promised = run.view.device_tokens + run.view.host_tokens
        refusal = self.memory.admit(run, grant, now_s)
        if refusal is not None:
            self._refuse(run, model.waiting, refusal)
            return
        del model.waiting[call.id]
        model.running[call.id] = run.view
        run.view.device_tokens, run.view.host_tokens = run.device_tokens, run.host_tokens
        run.grant, run.by_sp, run.admitted_s = grant, by_sp, now_s
        run.rounds_waited = self.rounds - run.arrived_round
        self._note_evictions()
        cached = run.device_tokens + run.host_tokens
        if cached < promised:
            self._inbox.append(RestoredShort(call.id, promised - cached))
        timing = self._ground.timing[call.key.model]
        run.new_tokens = split_prompt(run.view)[3]
        restore_s = timing.restore_s(run.host_tokens) * self.memory.link_contention(now_s) if run.host_tokens else 0.0
        work_s = timing.prefill_s(run.new_tokens, cached, run.lost_tokens) * self._ground.prefill_factor()
        work_s *= self.memory.serving_slowdown(now_s)
        self._engine.prefill(run, restore_s + work_s)

    def _refuse(self, run: Run, queue: dict[int, CallView], why: str) -> None:
        """The engine cannot take the call now; it stays in ``queue``, or fails if it never can."""
        call_id, final = run.view.call.id, why == TOO_LARGE
        self._inbox.append(Rejected(call_id, why, final))
        if final:
            del queue[call_id], self.runs[call_id]
            self.memory.drop(run, self._env.now)
            self._host.failed(run, self)

    def _resume(self, batch: tuple[tuple[int, int], ...]) -> None:
        """Re-entry of held calls: KV that was swapped out comes back first, then one short prefill for all of them."""
        now_s, active = self._env.now, self.view.active
        assert active is not None
        model, timing = self.view.models[active], self._ground.timing[active]
        resumed, move_s, context = [], 0.0, 0
        for call_id, grant in batch:
            run = self.runs[call_id]
            swapped = run.swapped
            refusal = self.memory.resume(run, grant, now_s)
            if refusal == NO_ROOM:
                refusal, retracted_s = self._retract_for(run, grant, model)
                move_s += retracted_s
            if refusal is not None:
                self._refuse(run, model.held, refusal)
                continue
            tokens = run.context_tokens
            if swapped:
                swap = self.capabilities.inflight_kv == "swap"
                move_s += timing.swap_s_per_token * tokens if swap else self._recompute_s(run, timing)
            model.running[call_id] = model.held.pop(call_id)
            run.grant = grant
            context += tokens
            resumed.append(run)
        if resumed:
            count = len(resumed)
            self._engine.resume(resumed, move_s + timing.prefill_s(count, context // count))

    def _retract_for(self, run: Run, grant: int, model: ModelView) -> tuple[str | None, float]:
        """In-flight KV fills the device: the last held calls give theirs up until ``run`` fits, as an engine retracts.

        What the memory says in the end, and the seconds that it took.
        """
        now_s, retracted_s = self._env.now, 0.0
        for call_id in reversed(model.held):
            other = self.runs[call_id]
            if other is run or other.swapped:
                continue
            retracted_s += self.memory.swap_out(other, now_s)
            if (answer := self.memory.resume(run, grant, now_s)) != NO_ROOM:
                return answer, retracted_s
        return NO_ROOM, retracted_s

    def _recompute_s(self, run: Run, timing: Timing) -> float:
        host = self.memory.restorable(run)
        return timing.restore_s(host) + timing.prefill_s(0, host, run.context_tokens - host)

    def _decode_factor(self) -> float:
        return self._ground.decode_factor() * self.memory.serving_slowdown(self._env.now)

    def _on_first_token(self, run: Run) -> None:
        if run.first_token_s < 0.0:  # a call that a dead engine had begun keeps the token that its client saw
            run.first_token_s = self._env.now
        if run.host_tokens:
            self.memory.restored(run)
        self._happened(FirstToken(run.view.call.id))

    def _on_segment_end(self, run: Run, reason: str) -> None:
        call = run.view.call
        model = self.view.models[call.key.model]
        self._engine.show(model)
        del model.running[call.id]
        if run.output_tokens == 0:  # cancelled while it ran
            del self.runs[call.id]
            self.memory.drop(run, self._env.now)
            self._cancelled(run)
            return
        if reason != "finished":
            model.held[call.id] = run.view
        else:
            now_s = self._env.now
            del self.runs[call.id]
            self.memory.finish(run, now_s)
            self._lines.used(call.key, now_s)
            self._host.finished(run, self)
        self._happened(SegmentEnded(call.id, run.view.generated_tokens, reason))

    # --- switches --------------------------------------------------------------------------------------------------

    def _begin_switch(self, target: str) -> None:
        assert self._engine.idle, "a switch met a busy engine"
        source = self.view.active
        self._host.footprint_peaks(self)
        self._group.switch_to(target, [self.runs[call_id] for call_id in self.view.models[source].held] if source is not None else [])
        if source is not None:
            self._lines.lose_device(source)

    def _switched(self, record: LogicalSwitch) -> None:
        self._engine.load(record.target, self._ground.timing[record.target])
        self._engine.show(self.view.models[record.target])
        self._look_again = True
        self._host.switched(self, record)
        self._happened(SwitchDone(record.target, record.phases_s, record.path))
        self._host.slot_opened(self)

    def open_at_start(self, models: tuple[str, ...]) -> None:
        """Models that are resident when the run starts; the first is active."""
        self._group.open_at_start(models)
        if models:
            self._engine.load(models[0], self._ground.timing[models[0]])

    # --- rounds and faults -----------------------------------------------------------------------------------------

    def _report(self, summary: RoundSummary) -> None:
        self._predictor.observe(summary)
        for name, model in self.view.models.items():
            model.timing = self._predictor.timing(name)
        self.rounds += 1
        self.deadline_risk += summary.at_risk
        for slot in summary.slots:
            for call_id in slot.parked_calls:
                run = self.runs.get(call_id)
                if run is not None:
                    run.parked += 1
        self._host.round_closed(self, summary)

    def engine_down(self, rank: int) -> None:
        """The engine dies: everything in it waits again with its KV lost; a switch under way fails."""
        self._engine.abort()
        self._tick = self._tick_at_s = None
        self.view.healthy = False
        abandoned: list[Run] = []
        for model in self.view.models.values():
            abandoned += self._take_back(model)
        self._group.crash()
        self._lines.doubt_all()
        for model in self.view.models.values():
            for call_id in model.waiting:
                self._look(self.runs[call_id])
        self._happened(EngineDown(rank))
        for run in abandoned:
            self._cancelled(run)
        self._host.health_changed(self)

    def _take_back(self, model: ModelView) -> list[Run]:
        """Calls of a dead engine wait again, in order of arrival; returns those that were cancelled, for whom nobody waits."""
        abandoned, waiting = [], list(model.waiting.values())
        for calls in (model.running, model.held):
            for call_id, item in calls.items():
                run = self.runs[call_id]
                self.memory.drop(run, self._env.now)
                if run.output_tokens == 0:
                    abandoned.append(self.runs.pop(call_id))
                    continue
                item.generated_tokens = 0
                run.swapped = False
                waiting.append(item)
            calls.clear()
        waiting.sort(key=lambda item: (item.arrived_s, item.call.id))
        model.waiting = {item.call.id: item for item in waiting}
        return abandoned

    def engine_up(self) -> None:
        self.view.healthy = True
        self._happened(EngineUp())
        self._host.health_changed(self)

    def switch_failed(self, why: str) -> None:
        """The switch under way does not succeed; no model is active afterwards."""
        self._happened(SwitchFailed(self._group.fail(), why))
