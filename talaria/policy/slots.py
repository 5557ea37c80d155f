"""The slot scheduler: one state machine per instance, P → D₁ → (SP → D)* → D_fin, in rounds (SPEC §4).

``step(event, view, now_s)`` returns commands and remembers only its own books: the open round and slot, what it has
promised, and how long calls have waited. Everything about the engine comes from the event and the view.

One closing rule serves every configuration: a slot ends when its protected steps have run and nothing is admissible or
expected. A return is *expected* while a live lease of the active model is younger than ``linger``, or while a call of the
slot is still in flight, since its session comes back when it completes. Without SP nothing is expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from talaria.policy.batches import EMPTY, Batch, choose, fair_order, is_sp_eligible
from talaria.policy.instance import (
    Admit,
    Arrived,
    CallView,
    Cancelled,
    Close,
    Command,
    EngineDown,
    EngineView,
    Event,
    FirstToken,
    ModelView,
    Open,
    Rejected,
    Report,
    RestoredShort,
    Resume,
    RoundSummary,
    SegmentEnded,
    SlotSummary,
    Stage,
    Switch,
    SwitchDone,
    SwitchFailed,
    Tick,
    Unstage,
    Wait,
)  # fmt: skip
from talaria.policy.knobs import Knobs
from talaria.policy.predict import admission_s
from talaria.policy.rounds import (
    RoundPlan,
    SlotPlan,
    activation_s,
    has_work,
    plan_round,
    queued_work_s,
    round_load_s,
    round_order,
    slot_budget_s,
    step_s,
)
from talaria.policy.snapshot import Residency

_EPS_S = 1e-9
_EPS_STEPS = 1e-6
_STALL_RETRY_S = 1.0  # after a pass in which the engine took nothing of what waits
UNLIMITED_STEPS = 1 << 20


@dataclass(slots=True)
class _Slot:
    """The open slot. Times are absolute; ``promised_until_s`` is when all grants given so far should have run."""

    plan: SlotPlan
    opened_s: float
    ends_s: float
    promised_until_s: float
    switch_s: float = 0.0
    pending: dict[int, float] = field(default_factory=dict)
    """Calls of the batch in prefill, with their predicted seconds; the engine is at no decode boundary before this is empty."""
    batch_started_s: float = 0.0
    batch_predicted_s: float = 0.0
    batch_is_sp: bool = False
    offered: set[int] = field(default_factory=set)
    """Calls that waited when the slot opened, and so were P's to admit."""
    rejected: set[int] = field(default_factory=set)
    prefill_s: float = 0.0
    prefill_predicted_s: float = 0.0
    sp_s: float = 0.0
    linger_s: float = 0.0
    lingers_since_s: float = -1.0
    p_admitted: int = 0
    sp_admitted: int = 0
    sp_batches: int = 0
    oversize: int = 0
    sp_allowed: bool = True
    draining: bool = False
    """Nothing is admissible or expected any more: D_fin."""
    work: tuple[float, int, int, int] = (0.0, 0, 0, 0)
    """The model's decode counters when the slot opened."""


@dataclass(slots=True)
class _Round:
    plan: RoundPlan
    started_s: float
    position: int = 0
    switch_s: float = 0.0
    closed: list[SlotSummary] = field(default_factory=list)


class SlotScheduler:
    """Decides when each waiting, running and held call of one instance runs."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._round: _Round | None = None
        self._slot: _Slot | None = None
        self._switching: str | None = None
        self._switch_started_s = 0.0
        self._switch_predicted_s = 0.0
        self._staged_for: str | None = None
        self._rounds = 0
        self._overrun_s = 0.0
        self._arrived_round: dict[int, int] = {}
        self._retry_s: dict[str, float] = {}
        self._promised_until_s = 0.0
        self._stalled = False

    # --- events ---------------------------------------------------------------------------------------------------

    def step(self, event: Event, view: EngineView, now_s: float) -> list[Command]:
        """What to do now that ``event`` has happened. Any event is legal in any phase."""
        commands: list[Command] = []
        self._absorb(event, view, now_s)
        if not view.healthy:
            return commands
        if view.capabilities.hot:
            self._step_hot(view, now_s, commands)
        elif self._switching is None:
            if self._slot is None:
                self._next_slot(view, now_s, commands)
            else:
                self._advance(view, now_s, commands)
        return commands

    @property
    def phase(self) -> str:
        """Where the instance stands in SPEC §4.1: idle, switch, P, D1, SP, D, Dfin, or linger within D."""
        slot = self._slot
        if self._switching is not None:
            return "switch"
        if slot is None:
            return "idle"
        if slot.pending:
            return "SP" if slot.batch_is_sp else "P"
        if slot.lingers_since_s >= 0.0:
            return "linger"
        return "Dfin" if slot.draining else "D" if slot.sp_batches else "D1"

    def _absorb(self, event: Event, view: EngineView, now_s: float) -> None:
        """Keep the books; decides nothing."""
        kind, slot = type(event), self._slot
        if kind is not Rejected:
            self._stalled = False
        if kind is Arrived:
            self._arrived_round[event.call.id] = self._rounds  # type: ignore[union-attr]
        elif kind is FirstToken:
            self._arrived_round.pop(event.call_id, None)  # type: ignore[union-attr]
            if slot is not None:
                self._prefilled(slot, event.call_id, now_s)  # type: ignore[union-attr]
        elif kind is SegmentEnded:
            if slot is not None:
                slot.rejected.clear()
                self._prefilled(slot, event.call_id, now_s)  # type: ignore[union-attr]
                model = view.models[slot.plan.model]
                if not model.running:
                    slot.promised_until_s = now_s
        elif kind is Rejected or kind is Cancelled:
            call_id: int = event.call_id  # type: ignore[union-attr]
            if kind is Cancelled or event.final:  # type: ignore[union-attr]
                self._arrived_round.pop(call_id, None)
            if slot is not None:
                if kind is Rejected:
                    self._refused(slot, call_id)
                self._prefilled(slot, call_id, now_s)
        elif kind is RestoredShort:
            if slot is not None:
                slot.promised_until_s += view.models[slot.plan.model].timing.prefill_s(0, 0, event.tokens)  # type: ignore[union-attr]
        elif kind is SwitchDone and event.model == self._switching:  # type: ignore[union-attr]
            self._switched(event, view, now_s)  # type: ignore[arg-type]
        elif kind is SwitchFailed and event.model == self._switching:  # type: ignore[union-attr]
            self._switch_failed(event, now_s)  # type: ignore[arg-type]
        elif kind is Tick:
            if slot is not None:
                slot.rejected.clear()
        elif kind is EngineDown:
            self._abandon()

    def _refused(self, slot: _Slot, call_id: int) -> None:
        """The engine did not take a forwarded call: it was not admitted, and cost nothing."""
        slot.rejected.add(call_id)
        predicted_s = slot.pending.get(call_id)
        if predicted_s is None:
            return
        slot.batch_predicted_s -= predicted_s
        slot.promised_until_s -= predicted_s
        if slot.batch_is_sp:
            slot.sp_admitted -= 1
        else:
            slot.p_admitted -= 1

    def _prefilled(self, slot: _Slot, call_id: int, now_s: float) -> None:
        """One call of the batch is out of prefill (or out of the engine); the last one ends the batch."""
        if call_id not in slot.pending:
            return
        del slot.pending[call_id]
        if not slot.pending:
            took_s = now_s - slot.batch_started_s
            slot.prefill_s += took_s
            slot.prefill_predicted_s += slot.batch_predicted_s
            if slot.batch_is_sp:
                slot.sp_s += took_s
            slot.promised_until_s += took_s - slot.batch_predicted_s

    def _switched(self, event: SwitchDone, view: EngineView, now_s: float) -> None:
        took_s = now_s - self._switch_started_s
        self._switching = None
        self._staged_for = None
        round_ = self._round
        if round_ is None:  # the engine came back under a round that was abandoned
            return
        round_.switch_s += took_s
        plan = round_.plan.slots[round_.position]
        if plan.model == event.model:
            self._slot = self._new_slot(plan, view, now_s, took_s)

    def _switch_failed(self, event: SwitchFailed, now_s: float) -> None:
        """The model sits out: retried after as long as the switch was predicted to take, at least a second."""
        took_s = now_s - self._switch_started_s
        self._switching = None
        self._staged_for = None
        self._retry_s[event.model] = now_s + max(1.0, self._switch_predicted_s)
        if self._round is not None:
            self._round.switch_s += took_s
            self._round.position += 1

    def _abandon(self) -> None:
        """An engine that went down takes the open round with it; calls are in the view, wherever its host put them."""
        self._round = self._slot = self._switching = self._staged_for = None

    # --- rounds and slots ------------------------------------------------------------------------------------------

    def _next_slot(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """Open the next slot of the round, or the next round's first; idle if no model has work."""
        while True:
            if self._round is not None and self._round.position >= len(self._round.plan.slots):
                self._close_round(now_s, commands)
            if self._round is None and not self._open_round(view, now_s):
                retries = [at_s for at_s in self._retry_s.values() if at_s > now_s]
                if self._stalled:
                    retries.append(now_s + _STALL_RETRY_S)
                commands.append(Wait(min(retries, default=None)))
                return
            assert self._round is not None
            plan = self._round.plan.slots[self._round.position]
            if not self._worth_visiting(view, plan.model, now_s):
                self._round.position += 1
                continue
            if view.active != plan.model:
                self._switch(view, plan.model, now_s, commands)
                return
            self._slot = self._new_slot(plan, view, now_s, 0.0)
            self._advance(view, now_s, commands)
            return

    def _open_round(self, view: EngineView, now_s: float) -> bool:
        if self._stalled:
            return False
        order = [name for name in round_order(view, self._knobs, continuing=self._rounds > 0) if self._retry_s.get(name, 0.0) <= now_s]
        if not any(has_work(view.models[name]) for name in order):
            return False
        self._round = _Round(plan_round(view, order, self._knobs, self._overrun_s), now_s)
        self._overrun_s = 0.0
        self._rounds += 1
        return True

    def _worth_visiting(self, view: EngineView, name: str, now_s: float) -> bool:
        """A model whose work has gone since the round was planned is passed over, unless idle ones are visited too."""
        return self._retry_s.get(name, 0.0) <= now_s and (self._knobs.visit_idle or has_work(view.models[name]))

    def _switch(self, view: EngineView, name: str, now_s: float, commands: list[Command]) -> None:
        absent = view.models[name].residency is Residency.ABSENT
        if absent:
            resident = [other for other, model in view.models.items() if model.residency is not Residency.ABSENT]
            if len(resident) >= view.capabilities.max_resident_models:
                commands.append(Close(self._victim(view, resident, now_s)))
        self._switching = name
        self._switch_started_s = now_s
        self._switch_predicted_s = activation_s(view, name)
        commands.append(Open(name) if absent else Switch(name))

    def _victim(self, view: EngineView, resident: list[str], now_s: float) -> str:
        """The resident model with the least to do here: calls first, then live leases, then registration order."""

        def claims(name: str) -> tuple[int, int]:
            model = view.models[name]
            live = sum(1 for _, expires_s in model.leases.values() if expires_s > now_s)
            return len(model.waiting) + len(model.held), live

        return min(resident, key=claims)

    def _new_slot(self, plan: SlotPlan, view: EngineView, now_s: float, switch_s: float) -> _Slot:
        model = view.models[plan.model]
        promised_until_s = max(now_s, self._promised_until_s) if model.running else now_s
        budget_s = math.inf
        if self._round is not None:
            round_ = self._round
            left_s = round_.started_s + round_.plan.length_s - now_s
            budget_s = slot_budget_s(view, round_.plan, round_.position, left_s, self._knobs)
        slot = _Slot(plan, now_s, now_s + budget_s, promised_until_s, switch_s)
        slot.work = (model.decode_s, model.decode_steps, model.decode_sequence_steps, model.decode_context_steps)
        slot.sp_allowed = view.capabilities.session_prefill and not self._someone_starves()
        return slot

    def _someone_starves(self) -> bool:
        """A call has waited max_wait_rounds behind SP returns and linger: this slot has neither (bounded wait)."""
        oldest = min(self._arrived_round.values(), default=self._rounds)
        return self._rounds - oldest > self._knobs.max_wait_rounds

    def _close_slot(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        slot, round_ = self._slot, self._round
        assert slot is not None and round_ is not None
        self._slot = None
        self._promised_until_s = slot.promised_until_s
        model = view.models[slot.plan.model]
        parked = tuple(call_id for call_id, item in model.waiting.items() if item.call.is_return)
        decode_s, predicted_s = _decode_since(model, slot.work)
        self._end_linger(slot, now_s)
        round_.closed.append(
            SlotSummary(
                model=slot.plan.model, opened_s=slot.opened_s, closed_s=now_s, switch_s=slot.switch_s,
                switch_predicted_s=self._switch_predicted_s if slot.switch_s > 0.0 else 0.0,
                prefill_s=slot.prefill_s, prefill_predicted_s=slot.prefill_predicted_s, decode_s=decode_s, decode_predicted_s=predicted_s,
                sp_admitted=slot.sp_admitted, parked=len(parked), p_admitted=slot.p_admitted, sp_batches=slot.sp_batches,
                d_steps=slot.plan.protected_steps, sp_s=slot.sp_s, linger_s=slot.linger_s, parked_calls=parked, oversize=slot.oversize,
            )
        )  # fmt: skip
        round_.position += 1
        self._next_slot(view, now_s, commands)

    def _close_round(self, now_s: float, commands: list[Command]) -> None:
        round_ = self._round
        assert round_ is not None
        self._round = None
        if not round_.closed and round_.switch_s == 0.0:  # everything it was planned for went away: no pass was made
            return
        wall_s = now_s - round_.started_s
        self._stalled = wall_s == 0.0 and not any(slot.p_admitted for slot in round_.closed)
        bound_s = round_.plan.bound_s
        self._overrun_s = max(0.0, wall_s - bound_s)
        at_risk = round_.plan.infeasible or max(wall_s, round_.plan.predicted_s) > bound_s + _EPS_S
        summary = RoundSummary(
            index=self._rounds - 1, started_s=round_.started_s, ended_s=now_s, predicted_s=round_.plan.predicted_s,
            switch_s=round_.switch_s, slots=tuple(round_.closed), overrun_s=self._overrun_s, at_risk=at_risk,
            infeasible=round_.plan.infeasible,
        )  # fmt: skip
        commands.append(Report(summary))

    # --- inside a slot ---------------------------------------------------------------------------------------------

    def _advance(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """One decision at a decode boundary of the open slot; none while a batch is in prefill."""
        slot = self._slot
        assert slot is not None
        if slot.pending:
            return
        model = view.models[slot.plan.model]
        if now_s == slot.opened_s and not slot.p_admitted and not slot.rejected:
            self._stage_next(view, commands)
            if self._open_with_p(slot, model, view, now_s, commands):
                return
        spent = now_s >= slot.ends_s - _EPS_S
        if not spent and slot.sp_allowed and self._admit_sp(slot, model, view, now_s, commands):
            return
        if not spent and self._only_this_model(view, slot.plan.model) and self._ordinary_waits(slot, model):
            self._close_slot(view, now_s, commands)  # no switch is at stake: a new slot of the same model admits at once
            return
        until_s = now_s if spent or not slot.sp_allowed else self._expected_until_s(slot, model, now_s)
        slot.draining = until_s <= now_s + _EPS_S
        if not slot.draining:
            if any(call_id not in slot.rejected for call_id in model.held):
                self._regrant(slot, model, until_s, now_s, commands)
            elif not model.running:
                self._linger(slot, until_s, now_s, commands)
            return
        if not model.running:
            self._close_slot(view, now_s, commands)

    def _open_with_p(self, slot: _Slot, model: ModelView, view: EngineView, now_s: float, commands: list[Command]) -> bool:
        """P: in-flight calls first (their decode is protected), then ordinary waiting work within what is left."""
        steps = slot.plan.protected_steps
        free_kv = model.free_kv_tokens
        begins_s = now_s  # decode of this slot, behind what comes before it
        for item in model.held.values():
            context = item.call.prompt_tokens + item.generated_tokens
            begins_s += model.timing.swap_s_per_token * context
            free_kv -= context + steps
        if model.held:
            commands.append(Resume(tuple((call_id, steps) for call_id in model.held)))
        batch = EMPTY
        slot.offered.update(model.waiting)
        waiting = [item for call_id, item in model.waiting.items() if call_id not in slot.rejected]
        if waiting:
            room = view.capabilities.max_running - len(model.held) - len(model.running)
            batch = choose(
                self._p_order(waiting), model.timing, budget_s=slot.ends_s - begins_s - steps * step_s(model), free_kv_tokens=free_kv,
                room=room, output_tokens=steps, decode_steps=steps, oversize=True, empty=not model.held and not model.running,
            )  # fmt: skip
            self._forward(slot, model, batch, "P", steps, now_s, commands)
        if not batch.calls and not model.held:
            return False
        pace_s = step_s(model, len(batch.calls), sum(item.call.prompt_tokens for item in batch.calls))
        slot.promised_until_s = max(slot.promised_until_s, begins_s + batch.cost_s + steps * pace_s)
        return True

    def _p_order(self, waiting: list[CallView]) -> list[CallView]:
        """Calls that have waited too many rounds first, then tenants in turn, each in order of arrival."""
        limit = self._rounds - self._knobs.max_wait_rounds
        late = [item for item in waiting if self._arrived_round.get(item.call.id, self._rounds) < limit]
        if not late:
            return list(fair_order(waiting))
        late_ids = {item.call.id for item in late}
        return [*fair_order(late), *fair_order([item for item in waiting if item.call.id not in late_ids])]

    def _admit_sp(self, slot: _Slot, model: ModelView, view: EngineView, now_s: float, commands: list[Command]) -> bool:
        """SP: a batch B ⊆ E that fits what is left after the decode already promised (SPEC §4.1)."""
        passed = slot.offered | slot.rejected
        eligible = [item for call_id, item in model.waiting.items() if call_id not in passed and is_sp_eligible(item)]
        if not eligible:
            return False
        if self._knobs.sp_order == "cheapest":
            eligible.sort(key=lambda item: admission_s(model.timing, item))
        pace_s = step_s(model)
        promised_steps = max(0.0, slot.promised_until_s - now_s) / pace_s
        room = view.capabilities.max_running - len(model.running) - len(model.held)
        batch = choose(
            fair_order(eligible), model.timing, budget_s=slot.ends_s - now_s - (promised_steps + 1.0) * pace_s,
            free_kv_tokens=model.free_kv_tokens, room=room, output_tokens=slot.plan.protected_steps, decode_steps=promised_steps + 1.0,
        )  # fmt: skip
        if not batch.calls:
            return False
        one_step_s = step_s(model, len(batch.calls), sum(item.call.prompt_tokens for item in batch.calls))
        left_s = slot.ends_s - now_s - batch.cost_s
        steps = max(1, min(slot.plan.protected_steps, _steps_within(left_s, one_step_s)))
        self._forward(slot, model, batch, "SP", steps, now_s, commands)
        own_steps = min(steps, max(_expected_left(item) for item in batch.calls))
        slot.promised_until_s = min(slot.ends_s, now_s + batch.cost_s + one_step_s * max(promised_steps, own_steps))
        return True

    def _forward(self, slot: _Slot, model: ModelView, batch: Batch, phase: str, steps: int, now_s: float, commands: list[Command]) -> None:
        if not batch.calls:
            return
        commands.append(Admit(phase, tuple((item.call.id, steps) for item in batch.calls)))
        self._end_linger(slot, now_s)
        slot.pending = {item.call.id: cost_s for item, cost_s in zip(batch.calls, batch.costs_s, strict=True)}
        slot.batch_started_s = now_s
        slot.batch_predicted_s = batch.cost_s
        slot.batch_is_sp = phase == "SP"
        slot.oversize += batch.oversize
        if slot.batch_is_sp:
            slot.sp_admitted += len(batch.calls)
            slot.sp_batches += 1
        else:
            slot.p_admitted += len(batch.calls)

    def _expected_until_s(self, slot: _Slot, model: ModelView, now_s: float) -> float:
        """How long a return may still be expected in this slot: live leases within linger, and calls still in flight."""
        until_s = now_s
        for granted_s, expires_s in model.leases.values():
            if expires_s > now_s:
                until_s = max(until_s, min(expires_s, granted_s + self._knobs.linger_s))
        if model.held and self._knobs.linger_s > 0.0:
            until_s = max(until_s, now_s + step_s(model) * max(_expected_left(item) for item in model.held.values()))
        return min(until_s, slot.ends_s)

    def _regrant(self, slot: _Slot, model: ModelView, until_s: float, now_s: float, commands: list[Command]) -> None:
        """The slot stays open: its in-flight calls go on decoding meanwhile."""
        self._end_linger(slot, now_s)
        steps = max(1, _steps_within(until_s - now_s, step_s(model)))
        slot.promised_until_s = max(slot.promised_until_s, now_s + steps * step_s(model))
        commands.append(Resume(tuple((call_id, steps) for call_id in model.held if call_id not in slot.rejected)))

    def _linger(self, slot: _Slot, until_s: float, now_s: float, commands: list[Command]) -> None:
        if slot.lingers_since_s < 0.0:
            slot.lingers_since_s = now_s
        commands.append(Wait(until_s))

    def _end_linger(self, slot: _Slot, now_s: float) -> None:
        if slot.lingers_since_s >= 0.0:
            slot.linger_s += now_s - slot.lingers_since_s
            slot.lingers_since_s = -1.0

    def _only_this_model(self, view: EngineView, active: str) -> bool:
        round_ = self._round
        assert round_ is not None
        if len(round_.plan.slots) > 1 and self._knobs.visit_idle:
            return False
        return not any(name != active and has_work(model) for name, model in view.models.items())

    def _ordinary_waits(self, slot: _Slot, model: ModelView) -> bool:
        """A call that only P may admit waits, and did not fail to fit a moment ago."""
        passed = slot.offered | slot.rejected
        return any(
            call_id not in passed and not (slot.sp_allowed and is_sp_eligible(item))
            for call_id, item in model.waiting.items()
        )

    def _stage_next(self, view: EngineView, commands: list[Command]) -> None:
        """Stage the weights of the model whose slot comes next, while this one serves (SPEC §5.3)."""
        round_ = self._round
        assert round_ is not None
        slots = round_.plan.slots
        follower = slots[(round_.position + 1) % len(slots)].model
        resident = view.models[follower].residency in (Residency.PARKED, Residency.STAGED)
        possible = view.capabilities.staging and self._knobs.stage_rate > 0.0 and resident and follower != view.active
        target = follower if possible else None
        if self._staged_for is not None and self._staged_for != target:
            commands.append(Unstage(self._staged_for))
        if target is not None and self._staged_for != target:
            commands.append(Stage(target, self._knobs.stage_rate))
        self._staged_for = target

    # --- hot instances ---------------------------------------------------------------------------------------------

    def _step_hot(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """No round, no linger, no switch: any waiting call is admitted at any decode boundary within the limits."""
        name = view.active
        if name is None:
            self._reopen_hot(view, now_s, commands)
            return
        model = view.models[name]
        slot = self._slot
        if slot is None:
            if not has_work(model):
                return
            plan = SlotPlan(name, 0.0, UNLIMITED_STEPS, 0.0)
            slot = self._slot = self._new_slot(plan, view, now_s, 0.0)
        if slot.pending:
            return
        held = [call_id for call_id in model.held if call_id not in slot.rejected]
        if held:
            commands.append(Resume(tuple((call_id, UNLIMITED_STEPS) for call_id in held)))
        waiting = [item for call_id, item in model.waiting.items() if call_id not in slot.rejected]
        if waiting:
            batch = choose(
                fair_order(waiting), model.timing, budget_s=self._knobs.gamma * self._knobs.t_ttft_s, free_kv_tokens=model.free_kv_tokens,
                room=view.capabilities.max_running - len(model.running) - len(model.held), output_tokens=UNLIMITED_STEPS, oversize=True,
                empty=not model.running,
            )  # fmt: skip
            self._forward(slot, model, batch, "P", UNLIMITED_STEPS, now_s, commands)
        if slot.rejected and not slot.pending and not held and not model.running:
            commands.append(Wait(now_s + _STALL_RETRY_S))
        idle = not has_work(model)
        if idle or now_s - slot.opened_s > self._knobs.t_ttft_s:
            self._report_hot(slot, model, idle, now_s, commands)

    def _reopen_hot(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """The pinned model comes back after its engine died, at once or when a failed attempt may be repeated."""
        pinned = next(iter(view.models))
        retry_s = self._retry_s.get(pinned, 0.0)
        if retry_s > now_s:
            commands.append(Wait(retry_s))
        elif self._switching is None:
            self._switch(view, pinned, now_s, commands)

    def _report_hot(self, slot: _Slot, model: ModelView, idle: bool, now_s: float, commands: list[Command]) -> None:
        """A hot instance has no rounds; it sums up at least every T_TTFT while busy, so that beliefs stay fresh."""
        decode_s, predicted_s = _decode_since(model, slot.work)
        summary = SlotSummary(
            model=slot.plan.model, opened_s=slot.opened_s, closed_s=now_s, switch_s=0.0, switch_predicted_s=0.0, prefill_s=slot.prefill_s,
            prefill_predicted_s=slot.prefill_predicted_s, decode_s=decode_s, decode_predicted_s=predicted_s, sp_admitted=0, parked=0,
            p_admitted=slot.p_admitted, sp_batches=0, d_steps=0, sp_s=0.0, linger_s=0.0, parked_calls=(), oversize=slot.oversize,
        )  # fmt: skip
        self._rounds += 1
        took_s = now_s - slot.opened_s
        commands.append(Report(RoundSummary(self._rounds - 1, slot.opened_s, now_s, took_s, 0.0, (summary,), 0.0, False, False)))
        if idle:
            self._slot = None
            return
        slot.opened_s, slot.prefill_s, slot.prefill_predicted_s, slot.p_admitted, slot.oversize = now_s, 0.0, 0.0, 0, 0
        slot.work = (model.decode_s, model.decode_steps, model.decode_sequence_steps, model.decode_context_steps)

    # --- what the router is told -----------------------------------------------------------------------------------

    def outlook(self, view: EngineView, now_s: float) -> tuple[dict[str, tuple[float, float]], float, float]:
        """({model: (seconds to its next slot, queued work seconds)}, round left, next round's predicted load), for snapshots.

        Seconds to the next slot hold no switch cost (Eq. 1 charges it as C_act). A model outside the round waits for
        the round's end.
        """
        queued = {name: queued_work_s(model) for name, model in view.models.items()}
        if view.capabilities.hot:
            load_s = sum(queued.values())
            return {name: (0.0, work_s) for name, work_s in queued.items()}, 0.0, load_s
        load_s = round_load_s(view, round_order(view, self._knobs, continuing=True), self._knobs, queued)
        round_, slot = self._round, self._slot
        if round_ is None:
            return {name: (0.0, work_s) for name, work_s in queued.items()}, 0.0, load_s
        next_slot: dict[str, float] = {}
        elapsed_s = 0.0
        if slot is not None:
            elapsed_s = max(0.0, slot.promised_until_s - now_s)
            next_slot[slot.plan.model] = 0.0
        for plan in round_.plan.slots[round_.position + (slot is not None) :]:
            next_slot.setdefault(plan.model, elapsed_s)
            elapsed_s += plan.demand_s
        if slot is not None and not slot.pending and len(round_.plan.slots) > 1:
            next_slot[slot.plan.model] = elapsed_s  # P of an open slot is over: ordinary work waits for the next round
        return {name: (next_slot.get(name, elapsed_s), work_s) for name, work_s in queued.items()}, elapsed_s, load_s


def _expected_left(item: CallView) -> int:
    """Output tokens the call is still expected to produce; one slot's worth where nothing is known."""
    expected = item.call.expected_output_tokens
    if expected is None:
        return UNLIMITED_STEPS
    return max(1, expected - item.generated_tokens)


def _steps_within(seconds: float, step_s: float) -> int:
    """Whole decode steps in ``seconds``; a number of steps that went into ``seconds`` comes out of it."""
    return int(seconds / step_s + _EPS_STEPS)


def _decode_since(model: ModelView, work: tuple[float, int, int, int]) -> tuple[float, float]:
    """(actual, predicted) decode seconds since the counters read ``work``."""
    actual_s = model.decode_s - work[0]
    timing = model.timing
    predicted_s = (
        timing.decode_base_s * (model.decode_steps - work[1])
        + timing.decode_s_per_sequence * (model.decode_sequence_steps - work[2])
        + timing.decode_s_per_context_token * (model.decode_context_steps - work[3])
    )
    return actual_s, predicted_s
