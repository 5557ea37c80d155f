"""The slot scheduler: one state machine per instance, P → D₁ → (SP → D)* → D_fin, in rounds (SPEC §4).

``step(event, view, now_s)`` returns commands and remembers only its own books: the open round and slot, what it has
promised, and how long calls have waited. Everything about the engine comes from the event and the view.

One closing rule serves every configuration: a slot ends when its protected steps have run and nothing is admissible or
expected. A return is *expected* while a live lease of the active model is younger than ``linger``, or, where ``linger`` is
not zero, while a call is still in flight, since its session comes back when it completes. Without SP nothing is expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from talaria.policy.batches import EMPTY, choose, fair_order, is_sp_eligible
from talaria.policy.hot import HotSlots
from talaria.policy.instance import (
    Arrived,
    CallView,
    Cancelled,
    Command,
    EngineDown,
    EngineView,
    Event,
    FirstToken,
    ModelView,
    Rejected,
    Report,
    Resume,
    RoundSummary,
    SlotSummary,
    Stage,
    SwitchDone,
    SwitchFailed,
    Unstage,
    Wait,
)
from talaria.policy.knobs import Knobs
from talaria.policy.predict import admission_s
from talaria.policy.rounds import (
    RoundPlan,
    busy_models,
    has_work,
    plan_round,
    queued_work_s,
    round_load_s,
    round_order,
    slot_budget_s,
    step_s,
)
from talaria.policy.slot import STALL_RETRY_S, Slot, decode_counters, expected_left, steps_within
from talaria.policy.snapshot import PARKED, STAGED
from talaria.policy.switching import Switching

_EPS_S = 1e-9


@dataclass(slots=True)
class _Round:
    plan: RoundPlan
    started_s: float
    position: int = 0
    switch_s: float = 0.0
    oversize_s: float = 0.0
    """Prefill of calls that fit no slot: it is charged to the next round, and shortens no slot of this one (SPEC §4.1)."""
    closed: list[SlotSummary] = field(default_factory=list)


class SlotScheduler:
    """Decides when each waiting, running and held call of one instance runs."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._hot = HotSlots(knobs)
        self._switching = Switching()
        self._round: _Round | None = None
        self._slot: Slot | None = None
        self._staged_for: str | None = None
        self._rounds = 0
        self._last_other_s = self._last_ended_s = 0.0
        """How long the last round lasted beside decode, and when it ended."""
        self._overrun_s = 0.0
        self._arrived_round: dict[int, int] = {}
        self._promised_until_s = 0.0
        self._stalled = False
        """The engine took nothing of what waits in a whole pass: no new pass before something happens."""

    def set_knobs(self, knobs: Knobs) -> None:
        """Decide by ``knobs`` from the next step on. The open round keeps its plan: order, length and protected steps."""
        self._knobs = self._hot.knobs = knobs

    # --- events ---------------------------------------------------------------------------------------------------

    def step(self, event: Event, view: EngineView, now_s: float) -> list[Command]:
        """What to do now that ``event`` has happened. Any event is legal in any phase."""
        if view.capabilities.hot:
            return self._hot.step(event, view, now_s)
        commands: list[Command] = []
        self._absorb(event, view, now_s)
        if view.healthy and self._switching.target is None:
            if self._slot is None:
                self._next_slot(view, now_s, commands)
            else:
                self._advance(self._slot, view, now_s, commands)
        return commands

    def sits_out(self, name: str, view: EngineView, now_s: float) -> bool:
        """Whether a switch to the model failed so lately that it is not tried again yet."""
        return (self._hot.switching if view.capabilities.hot else self._switching).sits_out(name, now_s)

    def phase(self, view: EngineView) -> str:
        """Where the instance stands in SPEC §4.1: idle, switch, P, D1, SP, D, Dfin, or linger within D."""
        if view.capabilities.hot:
            return self._hot.phase
        if self._switching.target is not None:
            return "switch"
        return self._slot.phase if self._slot is not None else "idle"

    def _absorb(self, event: Event, view: EngineView, now_s: float) -> None:
        """Keep the books; decides nothing."""
        if type(event) is not Rejected:
            self._stalled = False
        if type(event) is Arrived:
            self._arrived_round[event.call.id] = self._rounds
            return
        if type(event) is FirstToken or type(event) is Cancelled or (type(event) is Rejected and event.final):
            self._arrived_round.pop(event.call_id, None)
        elif type(event) is SwitchDone or type(event) is SwitchFailed:
            self._switched(event, view, now_s)
            return
        elif type(event) is EngineDown:  # it takes the open round with it; calls are in the view, wherever its host put them
            self._round = self._slot = self._staged_for = self._switching.target = None
        if self._slot is not None:
            self._slot.absorb(event, view.models[self._slot.model], now_s)

    def _switched(self, event: SwitchDone | SwitchFailed, view: EngineView, now_s: float) -> None:
        took_s = self._switching.end(event, now_s)
        if took_s is None:
            return
        self._staged_for = None
        round_ = self._round
        if round_ is None:  # the engine came back under a round that was abandoned
            return
        round_.switch_s += took_s
        if isinstance(event, SwitchFailed):
            round_.position += 1
        else:
            self._slot = self._new_slot(round_, view, now_s, took_s)

    # --- rounds and slots ------------------------------------------------------------------------------------------

    def _next_slot(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """Open the next slot of the round, or the next round's first; idle if no model has work."""
        while True:
            if self._round is not None and self._round.position >= len(self._round.plan.slots):
                self._close_round(self._round, now_s, commands)
            round_ = self._round or self._open_round(view, now_s)
            if round_ is None:
                retries_s = self._switching.retries_s(now_s)
                if self._stalled:
                    retries_s.append(now_s + STALL_RETRY_S)
                commands.append(Wait(min(retries_s, default=None)))
                return
            name = round_.plan.slots[round_.position].model
            if not self._worth_visiting(view, name, now_s):
                round_.position += 1
                continue
            if view.active != name:
                self._switching.begin(view, name, now_s, commands)
                return
            self._slot = self._new_slot(round_, view, now_s, 0.0)
            self._advance(self._slot, view, now_s, commands)
            return

    def _open_round(self, view: EngineView, now_s: float) -> _Round | None:
        if self._stalled:
            return None
        order = round_order(view, self._knobs, continuing=self._rounds > 0)
        order = [name for name in order if not self._switching.sits_out(name, now_s)]
        if not any(has_work(view.models[name]) for name in order):
            return None
        last_other_s = self._last_other_s if self._last_ended_s == now_s else 0.0
        self._round = _Round(plan_round(view, order, self._knobs, self._overrun_s, last_other_s), now_s)
        self._overrun_s = 0.0
        self._rounds += 1
        return self._round

    def _worth_visiting(self, view: EngineView, name: str, now_s: float) -> bool:
        """A model whose work has gone since the round was planned is passed over, unless idle ones are visited too."""
        return not self._switching.sits_out(name, now_s) and (self._knobs.visit_idle or has_work(view.models[name]))

    def _new_slot(self, round_: _Round, view: EngineView, now_s: float, switch_s: float) -> Slot:
        plan = round_.plan.slots[round_.position]
        model = view.models[plan.model]
        left_s = round_.started_s + round_.plan.length_s + round_.oversize_s - now_s
        budget_s = slot_budget_s(view, round_.plan, round_.position, left_s, self._knobs)
        return Slot(
            plan.model, plan.protected_steps, now_s, now_s + budget_s,
            promised_until_s=max(now_s, self._promised_until_s) if model.running else now_s,
            switch_s=switch_s, sp_allowed=view.capabilities.session_prefill and not self._someone_starves(), decoded=decode_counters(model),
        )  # fmt: skip

    def _someone_starves(self) -> bool:
        """A call has waited max_wait_rounds behind SP returns and linger: this slot has neither (bounded wait)."""
        oldest = min(self._arrived_round.values(), default=self._rounds)
        return self._rounds - oldest > self._knobs.max_wait_rounds

    def _close_slot(self, slot: Slot, view: EngineView, now_s: float, commands: list[Command]) -> None:
        round_ = self._round
        assert round_ is not None
        self._slot = None
        self._promised_until_s = slot.promised_until_s
        round_.oversize_s += slot.oversize_s
        model = view.models[slot.model]
        parked = tuple([call_id for call_id, item in model.waiting.items() if item.call.turn > 0])
        round_.closed.append(slot.summary(model, parked, self._switching.predicted_s, now_s))
        round_.position += 1
        self._next_slot(view, now_s, commands)

    def _close_round(self, round_: _Round, now_s: float, commands: list[Command]) -> None:
        self._round = None
        if not round_.closed and round_.switch_s == 0.0:  # everything it was planned for went away: no pass was made
            return
        plan, wall_s = round_.plan, now_s - round_.started_s
        self._stalled = wall_s == 0.0 and not any(slot.p_admitted for slot in round_.closed)
        self._last_other_s, self._last_ended_s = wall_s - math.fsum([slot.decode_s for slot in round_.closed]), now_s
        self._overrun_s = max(0.0, wall_s - plan.bound_s)
        at_risk = plan.infeasible or max(wall_s, plan.predicted_s) > plan.bound_s + _EPS_S
        summary = RoundSummary(
            index=self._rounds - 1, started_s=round_.started_s, ended_s=now_s, predicted_s=plan.predicted_s, switch_s=round_.switch_s,
            slots=tuple(round_.closed), overrun_s=self._overrun_s, at_risk=at_risk, infeasible=plan.infeasible,
        )  # fmt: skip
        commands.append(Report(summary))

    # --- inside a slot ---------------------------------------------------------------------------------------------

    def _advance(self, slot: Slot, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """One decision at a decode boundary of the open slot; none while a batch is in prefill."""
        if slot.pending:
            return
        model = view.models[slot.model]
        if now_s == slot.opened_s and not slot.p_admitted and not slot.rejected:
            self._stage_next(view, commands)
            if self._open_with_p(slot, model, view, now_s, commands):
                return
        spent = now_s >= slot.ends_s - _EPS_S
        if model.waiting and not spent:
            eligible, ordinary = self._latecomers(slot, model)
            if eligible and self._admit_sp(slot, eligible, model, view, now_s, commands):
                return
            if ordinary and self._only_this_model(view, slot.model):
                self._close_slot(slot, view, now_s, commands)  # no switch is at stake: a new slot of the same model admits at once
                return
        until_s, pace_s = now_s, 0.0
        if slot.sp_allowed and not spent:
            pace_s = step_s(model) if model.held else 0.0
            until_s = self._expected_until_s(slot, model, pace_s, now_s)
        slot.draining = until_s <= now_s + _EPS_S
        if slot.draining:
            if not model.running:
                self._close_slot(slot, view, now_s, commands)
        elif model.held or not model.running:
            self._keep_open(slot, model, until_s, pace_s, now_s, commands)

    def _open_with_p(self, slot: Slot, model: ModelView, view: EngineView, now_s: float, commands: list[Command]) -> bool:
        """P: in-flight calls first (their decode is protected), then ordinary waiting work within what is left."""
        steps = slot.protected_steps
        free_kv = model.free_kv_tokens
        begins_s = now_s  # decode of this slot, behind what comes before it
        for item in model.held.values():
            context = item.call.prompt_tokens + item.generated_tokens
            if slot.switch_s > 0.0:  # without a switch its KV has stayed where it is
                begins_s += _comes_back_s(model, context, view.capabilities.inflight_kv)
            free_kv -= context + steps
        if model.held:
            commands.append(Resume(tuple([(call_id, steps) for call_id in model.held])))
        batch = EMPTY
        slot.offered.update(model.waiting)
        waiting = [item for call_id, item in model.waiting.items() if call_id not in slot.rejected]
        if waiting:
            room = view.capabilities.max_running - len(model.held) - len(model.running)
            batch = choose(
                self._p_order(waiting), model.timing, budget_s=slot.ends_s - begins_s - steps * step_s(model), free_kv_tokens=free_kv,
                room=room, output_tokens=steps, decode_steps=steps, alone_s=slot.ends_s - slot.opened_s - steps * model.timing.step_s(1, 0),
                empty=not model.held and not model.running,
            )  # fmt: skip
            if batch.calls:
                slot.forward(batch, "P", steps, now_s, commands)
        if not batch.calls and not model.held:
            return False
        pace_s = step_s(model, len(batch.calls), sum([item.call.prompt_tokens for item in batch.calls]))
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

    def _latecomers(self, slot: Slot, model: ModelView) -> tuple[list[CallView], bool]:
        """Of the calls that came after P and were not just refused: E of SPEC §4.1, and whether there are others, which need a P."""
        eligible, ordinary = [], False
        for call_id, item in model.waiting.items():
            if call_id in slot.offered or call_id in slot.rejected:
                continue
            if slot.sp_allowed and is_sp_eligible(item):
                eligible.append(item)
            else:
                ordinary = True
        return eligible, ordinary

    def _admit_sp(
        self, slot: Slot, eligible: list[CallView], model: ModelView, view: EngineView, now_s: float, commands: list[Command]
    ) -> bool:
        """SP: a batch B ⊆ E that fits what is left after the decode already promised (SPEC §4.1)."""
        if self._knobs.sp_order == "cheapest":
            eligible.sort(key=lambda item: admission_s(model.timing, item))
        pace_s = step_s(model)
        promised_steps = max(0.0, slot.promised_until_s - now_s) / pace_s
        room = view.capabilities.max_running - len(model.running) - len(model.held)
        batch = choose(
            fair_order(eligible), model.timing, budget_s=slot.ends_s - now_s - (promised_steps + 1.0) * pace_s,
            free_kv_tokens=model.free_kv_tokens, room=room, output_tokens=slot.protected_steps, decode_steps=promised_steps + 1.0,
        )  # fmt: skip
        if not batch.calls:
            return False
        one_step_s = step_s(model, len(batch.calls), sum([item.call.prompt_tokens for item in batch.calls]))
        left_s = slot.ends_s - now_s - batch.cost_s
        steps = max(1, min(slot.protected_steps, steps_within(left_s, one_step_s)))
        slot.forward(batch, "SP", steps, now_s, commands)
        own_steps = min(steps, expected_left(batch.calls))
        slot.promised_until_s = min(slot.ends_s, now_s + batch.cost_s + one_step_s * max(promised_steps, own_steps))
        return True

    def _expected_until_s(self, slot: Slot, model: ModelView, pace_s: float, now_s: float) -> float:
        """How long a return may still be expected in this slot: live leases within linger, and calls still in flight."""
        linger_s, until_s = self._knobs.linger_s, now_s
        for granted_s, expires_s in model.leases.values():
            if expires_s > until_s:
                until_s = max(until_s, min(expires_s, granted_s + linger_s))
        if model.held and linger_s > 0.0:
            until_s = max(until_s, now_s + pace_s * expected_left(model.held.values()))
        return until_s if until_s < slot.ends_s else slot.ends_s

    def _keep_open(self, slot: Slot, model: ModelView, until_s: float, pace_s: float, now_s: float, commands: list[Command]) -> None:
        """A return is expected: calls in flight go on decoding meanwhile, at ``pace_s`` a step; with none, the slot lingers."""
        held = [call_id for call_id in model.held if call_id not in slot.rejected]
        if held:
            slot.end_linger(now_s)
            steps = max(1, steps_within(until_s - now_s, pace_s))
            slot.promised_until_s = max(slot.promised_until_s, now_s + steps * pace_s)
            commands.append(Resume(tuple([(call_id, steps) for call_id in held])))
        elif not model.running:
            slot.linger(now_s)
            commands.append(Wait(until_s))

    def _only_this_model(self, view: EngineView, active: str) -> bool:
        """Whether a round would visit ``active``, which has work, and no other."""
        round_ = self._round
        assert round_ is not None
        if len(round_.plan.slots) > 1 and self._knobs.visit_idle:
            return False
        return busy_models(view) == [active]

    def _stage_next(self, view: EngineView, commands: list[Command]) -> None:
        """Stage the weights of the model whose slot comes next, while this one serves (SPEC §5.3)."""
        round_ = self._round
        assert round_ is not None
        slots = round_.plan.slots
        follower = slots[(round_.position + 1) % len(slots)].model
        resident = view.models[follower].residency in (PARKED, STAGED)
        possible = view.capabilities.staging and self._knobs.stage_rate > 0.0 and resident and follower != view.active
        target = follower if possible else None
        if self._staged_for is not None and self._staged_for != target:
            commands.append(Unstage(self._staged_for))
        if target is not None and self._staged_for != target:
            commands.append(Stage(target, self._knobs.stage_rate))
        self._staged_for = target

    # --- what the router is told -----------------------------------------------------------------------------------

    def outlook(self, view: EngineView, now_s: float) -> tuple[dict[str, tuple[float, float]], float, float]:
        """({model: (seconds to its next slot, queued work seconds)}, round left, next round's predicted load), for snapshots.

        Seconds to the next slot hold no switch cost (Eq. 1 charges it as C_act). A model outside the round waits for
        the round's end.
        """
        queued = {name: queued_work_s(model) if model.waiting else 0.0 for name, model in view.models.items()}
        if view.capabilities.hot:
            load_s = sum(queued.values())
            return {name: (0.0, work_s) for name, work_s in queued.items()}, 0.0, load_s
        load_s = round_load_s(view, round_order(view, self._knobs, continuing=True), queued, self._knobs)
        round_, slot = self._round, self._slot
        if round_ is None:
            return {name: (0.0, work_s) for name, work_s in queued.items()}, 0.0, load_s
        next_slot: dict[str, float] = {}
        elapsed_s = 0.0
        if slot is not None:
            elapsed_s = max(0.0, slot.promised_until_s - now_s)
            next_slot[slot.model] = 0.0
        for plan in round_.plan.slots[round_.position + (slot is not None) :]:
            next_slot.setdefault(plan.model, elapsed_s)
            elapsed_s += plan.demand_s
        if slot is not None and not slot.pending and len(round_.plan.slots) > 1:
            next_slot[slot.model] = elapsed_s  # P of an open slot is over: ordinary work waits for the next round
        return {name: (next_slot.get(name, elapsed_s), work_s) for name, work_s in queued.items()}, elapsed_s, load_s


def _comes_back_s(model: ModelView, context_tokens: int, inflight_kv: str) -> float:
    """Predicted seconds until a held call whose KV left the device at a switch can decode again (SPEC §6)."""
    if inflight_kv == "swap":
        return model.timing.swap_s_per_token * context_tokens
    return model.timing.prefill_s(0, 0, context_tokens)
