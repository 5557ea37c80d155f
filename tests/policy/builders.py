"""A slot scheduler under test: terse calls, and a host that executes its commands exactly as predicted, one decode step at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
    Resume,
    RoundSummary,
    SegmentEnded,
    Switch,
    SwitchDone,
    SwitchFailed,
    Tick,
    Wait,
)
from talaria.policy.knobs import Knobs
from talaria.policy.predict import admission_s
from talaria.policy.rounds import activation_s
from talaria.policy.slots import SlotScheduler
from talaria.policy.snapshot import Capabilities, Residency
from talaria.policy.timing import Timing

TIMING = Timing(
    prefill_base_s=0.1,
    prefill_s_per_token=1e-4,
    prefill_s_per_token2=0.0,
    decode_base_s=0.02,
    decode_s_per_sequence=0.0,
    decode_s_per_context_token=0.0,
    restore_base_s=0.01,
    restore_s_per_token=1e-5,
    swap_s_per_token=1e-6,
    d2d_switch_s=0.2,
    h2d_switch_s=2.0,
    open_s=30.0,
)
"""1,000 new tokens take 0.2 s, a decode step 20 ms whatever the batch."""
KNOBS = Knobs()
BOUND_S = KNOBS.gamma * KNOBS.t_ttft_s
STEPS = math.ceil(BOUND_S / KNOBS.t_tpot_s)
MOST_STEPS_AT_ONCE = 500


def call(
    number: int, model: str = "a", *, session: str = "", turn: int = 0, prompt: int = 1000, output: int = 50, tenant: str = "t", **more: Any
) -> Call:
    """A call of its own session; with ``turn`` a return whose prefix is all of the prompt but 200 tokens."""
    reusable = more.pop("reusable", max(0, prompt - 200) if turn else 0)
    key = LineKey(tenant, session or f"s{number}", model, "main")
    return Call(number, key, turn, 0.0, prompt, reusable, output, **more)


def view_of(*names: str, active: str | None = "a", capabilities: Capabilities | None = None, timing: Timing = TIMING) -> EngineView:
    """Models parked but for the active one, with plenty of room."""
    models = {name: ModelView(timing, Residency.ACTIVE if name == active else Residency.PARKED, free_kv_tokens=1_000_000) for name in names}
    return EngineView(capabilities or Capabilities(), models, active)


@dataclass
class Done:
    """One step of the scheduler as the host saw it."""

    now_s: float
    event: Event
    commands: list[Command]


@dataclass
class ModelHost:
    """Executes commands with exactly the predicted durations. Prefixes of lines that were served here are on the device
    while their model is active, and in host memory afterwards."""

    view: EngineView
    knobs: Knobs = KNOBS
    kv_tokens: int = 1_000_000
    now_s: float = 0.0
    done: list[Done] = field(default_factory=list)
    rounds: list[RoundSummary] = field(default_factory=list)
    ended: dict[int, tuple[float, str]] = field(default_factory=dict)
    first_token_s: dict[int, float] = field(default_factory=dict)
    refusals: int = 0
    """So many of the next forwarded calls are refused."""
    lease_s: float = 0.0
    """Completed calls are leased for so long."""
    watch: Callable[[ModelHost, Done], None] = lambda host, step: None
    """Called after every step, before its commands are carried out."""

    def __post_init__(self) -> None:
        self.scheduler = SlotScheduler(self.knobs)
        self._prefills: deque[tuple[list[int], float, bool]] = deque()
        self._grants: dict[int, int] = {}
        self._batch: list[int] = []
        self._cached: dict[LineKey, int] = {}
        self._on_host: set[LineKey] = set()
        self._gone: set[int] = set()
        self._engine: tuple[float, Callable[[], None]] | None = None
        self._tick_s: float | None = None
        self._switch: tuple[float, str] | None = None
        self._plans: list[tuple[float, int, Callable[[], object]]] = []
        self._planned = 0

    # --- what a test does ------------------------------------------------------------------------------------------

    def at(self, time_s: float, act: Callable[..., object], *arguments: Any) -> None:
        """Plan something for later; what is planned for one instant happens in the order of planning."""
        self._planned += 1
        self._plans.append((time_s, self._planned, partial(act, *arguments)))
        self._plans.sort(key=lambda plan: plan[:2])

    def submit(self, *calls: Call) -> None:
        for item in calls:
            item = replace(item, enqueued_s=self.now_s)
            seen = CallView(item, self.now_s)
            self._look(seen)
            self.view.models[item.key.model].waiting[item.id] = seen
            self.happened(Arrived(item))

    def cache(self, key: LineKey, tokens: int, *, on_host: bool = False) -> None:
        """The line's prefix is known here from before."""
        self._cached[key] = tokens
        if on_host:
            self._on_host.add(key)

    def lease(self, key: LineKey, seconds: float | None) -> None:
        leases = self.view.models[key.model].leases
        if seconds is None:
            leases.pop(key, None)
            self.happened(LeaseChanged(key, None))
        else:
            leases[key] = (self.now_s, self.now_s + seconds)

    def cancel(self, call_id: int) -> None:
        for model in self.view.models.values():
            if call_id in model.running:
                self._gone.add(call_id)
            elif call_id in model.waiting or call_id in model.held:
                model.waiting.pop(call_id, None)
                model.held.pop(call_id, None)
                self._end(call_id, "cancelled", Cancelled(call_id))

    def crash(self) -> None:
        self._engine = self._switch = self._tick_s = None
        self._prefills.clear()
        self._grants.clear()
        self.view.healthy, self.view.active = False, None
        for model in self.view.models.values():
            for items in (model.running, model.held):
                for call_id in list(items):
                    model.waiting[call_id] = items.pop(call_id)
                    model.waiting[call_id].generated_tokens = 0
            if model.residency is not Residency.ABSENT:
                model.residency, model.coverage = Residency.PARKED, 0.0
        self._look_again()
        self.happened(EngineDown(0))
        for call_id in sorted(self._gone):
            for model in self.view.models.values():
                model.waiting.pop(call_id, None)
            self._end(call_id, "cancelled", Cancelled(call_id))
        self._gone.clear()

    def recover(self) -> None:
        if not self.view.healthy:
            self.view.healthy = True
            self.happened(EngineUp())

    def fail_switch(self) -> None:
        if self._switch is not None:
            name = self._switch[1]
            self._switch = None
            self.happened(SwitchFailed(name, "checksum"))

    def run(self, until_s: float = math.inf) -> None:
        """Let time pass to ``until_s``, or until nothing more will happen."""
        while True:
            due = [(self._engine[0], 1, self._engine[1])] if self._engine else []
            if self._switch:
                due.append((self._switch[0], 2, self._finish_switch))
            if self._tick_s is not None:
                due.append((self._tick_s, 3, self._finish_tick))
            if self._plans:
                due.append((self._plans[0][0], 4, self._next_plan))
            if not due or min(due)[0] > until_s:
                break
            self.now_s, _, act = min(due, key=lambda entry: entry[:2])
            act()
        if until_s < math.inf:
            self.now_s = until_s

    @property
    def promised_steps(self) -> int:
        """Decode steps until the last grant given so far has run."""
        return max(self._grants.values(), default=0)

    # --- what a test asks ------------------------------------------------------------------------------------------

    def commanded(self, *kinds: type) -> list[Any]:
        """Commands of these kinds so far, in order."""
        return [command for step in self.done for command in step.commands if isinstance(command, kinds)]

    def batches(self, phase: str) -> list[tuple[int, ...]]:
        """Ids of the calls of each P or SP batch, in order."""
        return [tuple(call_id for call_id, _ in command.batch) for command in self.commanded(Admit) if command.phase == phase]

    def admitted_at(self, call_id: int) -> float:
        """When the call was forwarded."""
        return next(
            step.now_s for step in self.done for command in step.commands if isinstance(command, Admit) and call_id in dict(command.batch)
        )

    def slots(self) -> list[str]:
        """Models of all reported slots, in order."""
        return [slot.model for summary in self.rounds for slot in summary.slots]

    # --- execution -------------------------------------------------------------------------------------------------

    def happened(self, event: Event) -> None:
        """Step the scheduler; carry out what it commands."""
        inbox = deque([event])
        while inbox:
            event = inbox.popleft()
            active = self.view.active
            if active is not None:
                self.view.models[active].free_kv_tokens = self._free_kv(self.view.models[active])
            commands = self.scheduler.step(event, self.view, self.now_s)
            self.done.append(Done(self.now_s, event, commands))
            recent = self.done[-MOST_STEPS_AT_ONCE:]
            assert len(recent) < MOST_STEPS_AT_ONCE or recent[0].now_s < self.now_s, f"a livelock: {recent[-4:]}"
            self.watch(self, self.done[-1])
            self._tick_s = None
            for command in commands:
                inbox.extend(self._execute(command))

    def _execute(self, command: Command) -> list[Event]:
        if isinstance(command, Admit):
            return [event for call_id, grant in command.batch for event in self._admit(call_id, grant)]
        if isinstance(command, Resume):
            return self._resume(command)
        if isinstance(command, Switch | Open):
            self._begin_switch(command.model)
        elif isinstance(command, Close):
            self.view.models[command.model].residency = Residency.ABSENT
        elif isinstance(command, Wait):
            self._tick_s = command.until_s
        elif isinstance(command, Report):
            self.rounds.append(command.round)
        return []

    def _active(self) -> ModelView:
        assert self.view.active is not None
        return self.view.models[self.view.active]

    def _free_kv(self, model: ModelView) -> int:
        used = sum(i.call.prompt_tokens + i.generated_tokens + self._grants.get(c, 0) for c, i in model.running.items())
        return self.kv_tokens - used

    def _admit(self, call_id: int, grant: int) -> list[Event]:
        model = self._active()
        item = model.waiting[call_id]
        grant = _needed_steps(item, grant)
        if self.refusals or item.call.prompt_tokens + grant > self._free_kv(model):
            self.refusals = max(0, self.refusals - 1)
            return [Rejected(call_id, "no free KV")]
        model.running[call_id] = model.waiting.pop(call_id)
        self._grants[call_id] = grant
        self._enqueue([call_id], admission_s(model.timing, item), True)
        return []

    def _resume(self, command: Resume) -> list[Event]:
        model = self._active()
        moved_s, resumed, refused = 0.0, [], []
        for call_id, grant in command.batch:
            item = model.held[call_id]
            grant = _needed_steps(item, grant)
            if self.refusals or item.call.prompt_tokens + item.generated_tokens + grant > self._free_kv(model):
                self.refusals = max(0, self.refusals - 1)
                refused.append(Rejected(call_id, "no free KV"))
                continue
            model.running[call_id] = model.held.pop(call_id)
            self._grants[call_id] = grant
            moved_s += model.timing.swap_s_per_token * (item.call.prompt_tokens + item.generated_tokens)
            resumed.append(call_id)
        if resumed:
            self._enqueue(resumed, moved_s, False)
        return list[Event](refused)

    def _enqueue(self, call_ids: list[int], seconds: float, fresh: bool) -> None:
        self._prefills.append((call_ids, seconds, fresh))
        if self._engine is None:
            self._continue()

    def _continue(self) -> None:
        """At a boundary: prefill first, else one decode step of everything that runs."""
        self._engine = None
        if not self.view.healthy or self.view.active is None:
            return
        if self._prefills:
            self._engine = (self.now_s + self._prefills[0][1], self._finish_prefill)
        elif self._grants:
            self._batch = list(self._grants)
            self._engine = (self.now_s + self._active().timing.step_s(len(self._batch), self._context()), self._finish_step)

    def _context(self) -> int:
        running = self._active().running
        return sum(running[call_id].call.prompt_tokens + running[call_id].generated_tokens for call_id in self._batch)

    def _finish_prefill(self) -> None:
        call_ids, _, fresh = self._prefills.popleft()
        self._engine = None
        if fresh:
            for call_id in call_ids:
                self._active().running[call_id].generated_tokens = 1
                self.first_token_s.setdefault(call_id, self.now_s)
                self.happened(FirstToken(call_id))
        self._end_segments()
        self._boundary()

    def _finish_step(self) -> None:
        self._engine = None
        model = self._active()
        context = self._context()
        model.decode_s += model.timing.step_s(len(self._batch), context)
        model.decode_steps += 1
        model.decode_sequence_steps += len(self._batch)
        model.decode_context_steps += context
        for call_id in self._batch:
            model.running[call_id].generated_tokens += 1
            self._grants[call_id] -= 1
        self._end_segments()
        self._boundary()

    def _boundary(self) -> None:
        if self._engine is None:
            self._continue()

    def _end_segments(self) -> None:
        queued = {call_id for call_ids, _, _ in self._prefills for call_id in call_ids}
        for call_id in list(self._grants):
            model = self._active() if self.view.active else None
            if model is None or call_id not in model.running or call_id in queued:
                continue
            item = model.running[call_id]
            finished = item.generated_tokens >= (item.call.expected_output_tokens or 0)
            if call_id in self._gone:
                self._gone.discard(call_id)
                del model.running[call_id], self._grants[call_id]
                self._end(call_id, "cancelled", Cancelled(call_id))
            elif finished:
                del model.running[call_id], self._grants[call_id]
                self._cached[item.call.key] = item.call.prompt_tokens + item.generated_tokens
                if self.lease_s > 0.0:
                    model.leases[item.call.key] = (self.now_s, self.now_s + self.lease_s)
                self._end(call_id, "completed", SegmentEnded(call_id, item.generated_tokens, "finished"))
            elif self._grants[call_id] <= 0:
                model.held[call_id] = model.running.pop(call_id)
                del self._grants[call_id]
                self.happened(SegmentEnded(call_id, item.generated_tokens, "grant"))

    def _end(self, call_id: int, how: str, event: Event) -> None:
        assert call_id not in self.ended, f"call {call_id} ended twice"
        self.ended[call_id] = (self.now_s, how)
        self.happened(event)

    def _begin_switch(self, name: str) -> None:
        took_s = activation_s(self.view, name)
        assert not self._grants and not self._prefills, "a switch met a busy engine"
        for model in self.view.models.values():
            if model.residency is Residency.ACTIVE:
                model.residency = Residency.PARKED
        self.view.active = None
        self._switch = (self.now_s + took_s, name)

    def _finish_switch(self) -> None:
        assert self._switch is not None
        name = self._switch[1]
        self._switch = None
        self.view.active = name
        self.view.models[name].residency = Residency.ACTIVE
        self._look_again()
        self.happened(SwitchDone(name, (0.0, 0.0, 0.0, 0.0, 0.0), "h2d"))

    def _finish_tick(self) -> None:
        self._tick_s = None
        self.happened(Tick())

    def _next_plan(self) -> None:
        self._plans.pop(0)[2]()

    def _look(self, item: CallView) -> None:
        cached = min(item.call.reusable_tokens, self._cached.get(item.call.key, 0))
        on_device = item.call.key.model == self.view.active and item.call.key not in self._on_host
        item.device_tokens, item.host_tokens = (cached, 0) if on_device else (0, cached)

    def _look_again(self) -> None:
        for model in self.view.models.values():
            for item in model.waiting.values():
                self._look(item)


def _needed_steps(item: CallView, grant: int) -> int:
    """The part of a grant that the call can use."""
    return min(grant, (item.call.expected_output_tokens or 0) - item.generated_tokens)


def host(*models: str, active: str | None = "a", timing: Timing = TIMING, **more: Any) -> ModelHost:
    """A host of ``models``; the rest are fields of ``Capabilities``, of ``Knobs`` or of the host."""
    capabilities = {name: more.pop(name) for name in list(more) if name in Capabilities.__dataclass_fields__}
    knobs = {name: more.pop(name) for name in list(more) if name in Knobs.__dataclass_fields__}
    view = view_of(*(models or ("a",)), active=active, capabilities=Capabilities(**capabilities), timing=timing)
    return ModelHost(view, replace(KNOBS, **knobs), **more)


def decoding(*models: str, output: int = 1000, **more: Any) -> ModelHost:
    """Call 1 of model a is in its first decode, 0.2 s after it came; nothing else is there."""
    made = host(*models, **more)
    made.submit(call(1, output=output))
    made.run(0.25)
    assert 1 in made.first_token_s
    return made
