"""One open slot: what it was given, what it has promised, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from talaria.policy.batches import Batch
from talaria.policy.instance import (
    Admit,
    CallView,
    Cancelled,
    Command,
    Event,
    FirstToken,
    ModelView,
    Rejected,
    RestoredShort,
    SegmentEnded,
    SlotSummary,
    Tick,
)

STALL_RETRY_S = 1.0
"""When to offer again what the engine has refused and nothing in flight could make room for."""
UNLIMITED_STEPS = 1 << 20
_EPS_STEPS = 1e-6


@dataclass(slots=True)
class Slot:
    """Times are absolute; ``promised_until_s`` is when all grants given so far should have run."""

    model: str
    protected_steps: int
    """d_m (Eq. 4)."""
    opened_s: float
    ends_s: float
    promised_until_s: float
    switch_s: float = 0.0
    sp_allowed: bool = True
    draining: bool = False
    """Nothing is admissible or expected any more: D_fin."""
    pending: dict[int, float] = field(default_factory=dict)
    """Calls of the batch in prefill, with their predicted seconds; the engine is at no decode boundary before this is empty."""
    offered: set[int] = field(default_factory=set)
    """Calls that P was offered: what comes later is SP's, if it may join at all."""
    rejected: set[int] = field(default_factory=set)
    """Calls that the engine refused, until something changes."""
    batch_started_s: float = 0.0
    batch_predicted_s: float = 0.0
    batch_is_sp: bool = False
    prefill_s: float = 0.0
    prefill_predicted_s: float = 0.0
    sp_s: float = 0.0
    linger_s: float = 0.0
    lingers_since_s: float | None = None
    p_admitted: int = 0
    sp_admitted: int = 0
    sp_batches: int = 0
    oversize: int = 0
    oversize_s: float = 0.0
    """Prefill of the call that fits no slot, by which this one ends later: the next round pays it (SPEC §4.1)."""
    decoded: tuple[float, int, int, int] = (0.0, 0, 0, 0)
    """The model's decode counters when the slot opened."""

    @property
    def phase(self) -> str:
        """P, D1, SP, D or Dfin (SPEC §4.1), or linger within D."""
        if self.pending:
            return "SP" if self.batch_is_sp else "P"
        if self.lingers_since_s is not None:
            return "linger"
        return "Dfin" if self.draining else "D" if self.sp_batches else "D1"

    def absorb(self, event: Event, model: ModelView, now_s: float) -> None:
        """Keep the slot's books; decides nothing."""
        if type(event) is SegmentEnded:
            if self.rejected:
                self.rejected.clear()
            if self.pending:
                self._prefilled(event.call_id, now_s)
            if not model.running:
                self.promised_until_s = now_s
        elif type(event) is FirstToken or type(event) is Cancelled:
            self._prefilled(event.call_id, now_s)
        elif type(event) is Rejected:
            self._refused(event.call_id)
            self._prefilled(event.call_id, now_s)
        elif type(event) is RestoredShort:
            self.promised_until_s += model.timing.prefill_s(0, 0, event.tokens)
        elif type(event) is Tick:
            self.rejected.clear()

    def forward(self, batch: Batch, phase: str, steps: int, now_s: float, commands: list[Command]) -> None:
        """Command a P or SP batch in which each call may decode ``steps``."""
        commands.append(Admit(phase, tuple([(item.call.id, steps) for item in batch.calls])))
        if self.lingers_since_s is not None:
            self.end_linger(now_s)
        self.pending = {item.call.id: cost_s for item, cost_s in zip(batch.calls, batch.costs_s, strict=True)}
        self.batch_started_s = now_s
        self.batch_predicted_s = batch.cost_s
        self.batch_is_sp = phase == "SP"
        if batch.oversize:
            self.oversize += 1
            self._outlast(batch.cost_s)
        if self.batch_is_sp:
            self.sp_admitted += len(batch.calls)
            self.sp_batches += 1
        else:
            self.p_admitted += len(batch.calls)

    def _outlast(self, seconds: float) -> None:
        self.oversize_s += seconds
        self.ends_s += seconds

    def linger(self, now_s: float) -> None:
        if self.lingers_since_s is None:
            self.lingers_since_s = now_s

    def end_linger(self, now_s: float) -> None:
        if self.lingers_since_s is not None:
            self.linger_s += now_s - self.lingers_since_s
            self.lingers_since_s = None

    def summary(self, model: ModelView, parked: tuple[int, ...], switch_predicted_s: float, now_s: float) -> SlotSummary:
        """The slot as it was, closed at ``now_s``; ``parked`` are the returns that it leaves for later."""
        self.end_linger(now_s)
        decode_s, decode_predicted_s = self._decode_since_opened(model)
        return SlotSummary(
            model=self.model, opened_s=self.opened_s, closed_s=now_s, switch_s=self.switch_s,
            switch_predicted_s=switch_predicted_s if self.switch_s > 0.0 else 0.0, prefill_s=self.prefill_s,
            prefill_predicted_s=self.prefill_predicted_s, decode_s=decode_s, decode_predicted_s=decode_predicted_s,
            sp_admitted=self.sp_admitted, parked=len(parked), p_admitted=self.p_admitted, sp_batches=self.sp_batches,
            d_steps=self.protected_steps, sp_s=self.sp_s, linger_s=self.linger_s, parked_calls=parked, oversize=self.oversize,
        )  # fmt: skip

    def _refused(self, call_id: int) -> None:
        """The engine did not take a forwarded call: it was not admitted, and cost nothing."""
        self.rejected.add(call_id)
        predicted_s = self.pending.get(call_id)
        if predicted_s is None:
            return
        self.batch_predicted_s -= predicted_s
        self.promised_until_s -= predicted_s
        if self.batch_is_sp:
            self.sp_admitted -= 1
        else:
            self.p_admitted -= 1
            self._outlast(-self.oversize_s)

    def _prefilled(self, call_id: int, now_s: float) -> None:
        """One call of the batch is out of prefill (or out of the engine); the last one ends the batch."""
        if self.pending.pop(call_id, None) is None or self.pending:
            return
        took_s = now_s - self.batch_started_s
        self.prefill_s += took_s
        self.prefill_predicted_s += self.batch_predicted_s
        if self.batch_is_sp:
            self.sp_s += took_s
        self.promised_until_s += took_s - self.batch_predicted_s
        if self.oversize_s:
            self._outlast(took_s - self.batch_predicted_s)

    def _decode_since_opened(self, model: ModelView) -> tuple[float, float]:
        """(actual, predicted) decode seconds of the slot."""
        began_s, steps, sequence_steps, context_steps = self.decoded
        timing = model.timing
        predicted_s = (
            timing.decode_base_s * (model.decode_steps - steps)
            + timing.decode_s_per_sequence * (model.decode_sequence_steps - sequence_steps)
            + timing.decode_s_per_context_token * (model.decode_context_steps - context_steps)
        )
        return model.decode_s - began_s, predicted_s


def decode_counters(model: ModelView) -> tuple[float, int, int, int]:
    """The counters that ``Slot.decoded`` remembers."""
    return model.decode_s, model.decode_steps, model.decode_sequence_steps, model.decode_context_steps


def expected_left(items: Iterable[CallView]) -> int:
    """Output tokens until each of ``items`` is expected to have ended, at least 1; unlimited where nothing is known."""
    most = 1
    for item in items:
        expected = item.call.expected_output_tokens
        left = UNLIMITED_STEPS if expected is None else expected - item.generated_tokens
        if left > most:
            most = left
    return most


def steps_within(seconds: float, step_s: float) -> int:
    """Whole decode steps in ``seconds``; a number of steps that went into ``seconds`` comes out of it."""
    return int(seconds / step_s + _EPS_STEPS)
