"""Hot instances: one pinned model, no round, no linger, no switch (DESIGN, "The two faces of a TP group")."""

from __future__ import annotations

import math

from talaria.policy.batches import choose, fair_order
from talaria.policy.instance import (
    Command,
    EngineDown,
    EngineView,
    Event,
    ModelView,
    Report,
    Resume,
    RoundSummary,
    SwitchDone,
    SwitchFailed,
    Wait,
)
from talaria.policy.knobs import Knobs
from talaria.policy.rounds import has_work
from talaria.policy.slot import STALL_RETRY_S, UNLIMITED_STEPS, Slot, decode_counters
from talaria.policy.switching import Switching


class HotSlots:
    """Any waiting call is admitted at any decode boundary, within KV and prefill limits."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.switching = Switching()
        self._slot: Slot | None = None
        """The busy period: from the first call after idleness, cut where it is summed up."""
        self._reports = 0

    @property
    def phase(self) -> str:
        if self.switching.target is not None:
            return "switch"
        return self._slot.phase if self._slot is not None else "idle"

    def step(self, event: Event, view: EngineView, now_s: float) -> list[Command]:
        """As ``SlotScheduler.step``."""
        commands: list[Command] = []
        if type(event) is SwitchDone or type(event) is SwitchFailed:
            self.switching.end(event, now_s)
        elif type(event) is EngineDown:
            self._slot = None
            self.switching.target = None
        elif self._slot is not None:
            self._slot.absorb(event, view.models[self._slot.model], now_s)
        if view.healthy:
            if view.active is None:
                self._reopen(view, now_s, commands)
            else:
                self._advance(view.active, view, now_s, commands)
        return commands

    def _reopen(self, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """The pinned model comes back after its engine died, at once or when a failed attempt may be repeated."""
        pinned = next(iter(view.models))
        if self.switching.sits_out(pinned, now_s):
            commands.append(Wait(min(self.switching.retries_s(now_s))))
        elif self.switching.target is None:
            self.switching.begin(view, pinned, now_s, commands)

    def _advance(self, name: str, view: EngineView, now_s: float, commands: list[Command]) -> None:
        model = view.models[name]
        slot = self._slot
        if slot is None:
            if not has_work(model):
                return
            slot = self._slot = _busy_period(name, model, now_s)
        if slot.pending:
            return
        held = [call_id for call_id in model.held if call_id not in slot.rejected] if model.held else []
        if held:
            commands.append(Resume(tuple([(call_id, UNLIMITED_STEPS) for call_id in held])))
        if model.waiting:
            self._admit(slot, model, view.capabilities.max_running, now_s, commands)
        if slot.rejected and not slot.pending and not held and not model.running:
            commands.append(Wait(now_s + STALL_RETRY_S))
        idle = not has_work(model)
        if idle or now_s - slot.opened_s > self.knobs.t_ttft_s:
            self._report(slot, model, idle, now_s, commands)

    def _admit(self, slot: Slot, model: ModelView, max_running: int, now_s: float, commands: list[Command]) -> None:
        waiting = [item for call_id, item in model.waiting.items() if call_id not in slot.rejected]
        if not waiting:
            return
        budget_s = self.knobs.gamma * self.knobs.t_ttft_s
        batch = choose(
            fair_order(waiting), model.timing, budget_s=budget_s, free_kv_tokens=model.free_kv_tokens,
            room=max_running - len(model.running) - len(model.held), output_tokens=UNLIMITED_STEPS, alone_s=budget_s,
            empty=not model.running,
        )  # fmt: skip
        if batch.calls:
            slot.forward(batch, "P", UNLIMITED_STEPS, now_s, commands)

    def _report(self, slot: Slot, model: ModelView, idle: bool, now_s: float, commands: list[Command]) -> None:
        """Sum up when idle and at least every T_TTFT while busy, so that beliefs stay fresh."""
        summary = RoundSummary(
            index=self._reports, started_s=slot.opened_s, ended_s=now_s, predicted_s=now_s - slot.opened_s, switch_s=0.0,
            slots=(slot.summary(model, (), 0.0, now_s),), overrun_s=0.0, at_risk=False, infeasible=False,
        )  # fmt: skip
        commands.append(Report(summary))
        self._reports += 1
        self._slot = None
        if not idle:
            self._slot = _busy_period(slot.model, model, now_s)
            self._slot.pending, self._slot.rejected = slot.pending, slot.rejected
            self._slot.batch_started_s, self._slot.batch_predicted_s = slot.batch_started_s, slot.batch_predicted_s


def _busy_period(name: str, model: ModelView, now_s: float) -> Slot:
    """A slot without an end: nothing is promised or protected where no other model waits for its turn."""
    return Slot(name, protected_steps=0, opened_s=now_s, ends_s=math.inf, promised_until_s=now_s, decoded=decode_counters(model))
