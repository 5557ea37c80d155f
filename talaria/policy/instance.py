"""The two faces of a TP group, which every world implements and every policy decides against.

*Router's face*: ``Instance``. *Slot scheduler's face*: a stream of events, a plain-value ``EngineView``, and the
commands that come back from ``SlotScheduler.step(event, view, now_s)`` (DESIGN, "The two faces of a TP group").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from talaria.policy.calls import Call, LineKey
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, Residency
from talaria.policy.timing import Timing
from talaria.policy.values import value


class Instance(Protocol):
    """A TP group as the router's host sees it. The router itself only ever sees snapshots."""

    id: str
    capabilities: Capabilities

    def snapshot(self) -> InstanceSnapshot:
        """The state now; versions rise by one per snapshot."""

    def healthy(self) -> bool: ...

    def submit(self, call: Call) -> Any:
        """Queue ``call``; returns the host's own awaitable. Numbered: the n-th submission has sequence number n."""

    def lease_changed(self, key: LineKey, expires_s: float | None) -> None:
        """The router granted (a time) or ended (None) a soft reservation here; informs linger, pins nothing."""


# --- what happened ------------------------------------------------------------------------------------------------


@value(frozen=True, slots=True)
class Arrived:
    call: Call


@value(frozen=True, slots=True)
class Cancelled:
    """The client went away. The host has already taken the call out of the view."""

    call_id: int


@value(frozen=True, slots=True)
class FirstToken:
    """Prefill of one call of a P or SP batch is done; it decodes from now on."""

    call_id: int


@value(frozen=True, slots=True)
class SegmentEnded:
    """``reason``: ``finished`` (end of sequence or limit), ``grant`` (more to come, now held), ``stopped``."""

    call_id: int
    tokens: int
    reason: str


@value(frozen=True, slots=True)
class Rejected:
    """The engine could not take a forwarded call (no KV, ...); it waits again in the view, unless ``final``."""

    call_id: int
    why: str
    final: bool = False


@value(frozen=True, slots=True)
class RestoredShort:
    """Fewer tokens than promised were restored from the host; the rest is being recomputed."""

    call_id: int
    tokens: int


@value(frozen=True, slots=True)
class StageProgress:
    model: str
    coverage: float
    dirty: float


@value(frozen=True, slots=True)
class SwitchDone:
    """Phases in seconds (SPEC §5.4), slowest rank; ``path``: ``d2d``, ``partial``, ``h2d`` or ``open``."""

    model: str
    phases_s: tuple[float, ...]
    path: str


@value(frozen=True, slots=True)
class SwitchFailed:
    model: str
    why: str


@value(frozen=True, slots=True)
class EngineDown:
    rank: int


@value(frozen=True, slots=True)
class EngineUp:
    pass


@value(frozen=True, slots=True)
class LeaseChanged:
    key: LineKey
    expires_s: float | None


@value(frozen=True, slots=True)
class Tick:
    """A time asked for by ``Wait`` has come."""


Event = (
    Arrived | Cancelled | FirstToken | SegmentEnded | Rejected | RestoredShort | StageProgress | SwitchDone | SwitchFailed
    | EngineDown | EngineUp | LeaseChanged | Tick
)  # fmt: skip


# --- what the scheduler may look at ----------------------------------------------------------------------------------


@dataclass(slots=True)
class CallView:
    """One call on an instance. ``device_tokens + host_tokens`` of its prompt need no recomputation right now."""

    call: Call
    arrived_s: float
    device_tokens: int = 0
    host_tokens: int = 0
    generated_tokens: int = 0
    """Output so far, as of its last finished segment."""


@dataclass(slots=True)
class ModelView:
    """One model on an instance: calls by state, in order of arrival, and the policy's own belief about it."""

    timing: Timing
    residency: Residency
    coverage: float = 0.0
    waiting: dict[int, CallView] = field(default_factory=dict)
    """Arrived, not forwarded."""
    running: dict[int, CallView] = field(default_factory=dict)
    """Forwarded: in prefill or decoding within a grant."""
    held: dict[int, CallView] = field(default_factory=dict)
    """In flight between two grants."""
    free_kv_tokens: int = 0
    """Tokens that could be allocated now, evicting idle prefixes. Only kept current while calls wait for the model."""
    leases: dict[LineKey, tuple[float, float]] = field(default_factory=dict)
    """Leases of returns to this instance: granted at, expires at (seconds). A host may leave expired ones in."""
    decode_s: float = 0.0
    """Engine-busy seconds of decode so far, and what ran in them: steps, Σ batch, Σ context tokens over the steps."""
    decode_steps: int = 0
    decode_sequence_steps: int = 0
    decode_context_steps: int = 0


@dataclass(slots=True)
class EngineView:
    """The whole instance as a plain value. Its host keeps it current between steps; a policy only reads it, in ``step``."""

    capabilities: Capabilities
    models: dict[str, ModelView]
    active: str | None = None
    healthy: bool = True
    hbm_used_bytes: int = 0
    hbm_capacity_bytes: int = 0
    slack_bytes: int = 0


# --- what to do --------------------------------------------------------------------------------------------------


@value(frozen=True, slots=True)
class Admit:
    """Forward these calls as one batch; each decodes at most its grant. ``phase``: ``P`` or ``SP``."""

    phase: str
    batch: tuple[tuple[int, int], ...]
    """(call id, grant_steps)"""


@value(frozen=True, slots=True)
class Resume:
    """Continue in-flight calls of the active model."""

    batch: tuple[tuple[int, int], ...]


@value(frozen=True, slots=True)
class Stop:
    """End running segments early; each answers with ``SegmentEnded(reason="stopped")``."""

    call_ids: tuple[int, ...]


@value(frozen=True, slots=True)
class Stage:
    """Copy ``model``'s weights into the clean tail of the KV region, at ``rate`` (share of the link, 0..1)."""

    model: str
    rate: float = 1.0


@value(frozen=True, slots=True)
class Unstage:
    model: str


@value(frozen=True, slots=True)
class Switch:
    """Make a parked model active."""

    model: str


@value(frozen=True, slots=True)
class Open:
    """Make an absent model active; ``Close`` comes first where the instance has no room for one more."""

    model: str


@value(frozen=True, slots=True)
class Close:
    """Make a parked model absent."""

    model: str


@value(frozen=True, slots=True)
class Wait:
    """Nothing to do before ``until_s`` (None: before the next event)."""

    until_s: float | None


@value(frozen=True, slots=True)
class SlotSummary:
    """One model's turn, predicted and actual, in seconds (SPEC §4.2). Work sums feed the EWMA profiles."""

    model: str
    opened_s: float
    closed_s: float
    switch_s: float
    switch_predicted_s: float
    prefill_s: float
    """From admissions to last first tokens, the rest of a decode step that was running included."""
    prefill_predicted_s: float
    decode_s: float
    decode_predicted_s: float
    sp_admitted: int
    parked: int
    p_admitted: int
    sp_batches: int
    d_steps: int
    """Protected decode steps d_m of Eq. 4."""
    sp_s: float
    """The part of ``prefill_s`` spent in SP batches."""
    linger_s: float
    parked_calls: tuple[int, ...]
    """Returns that this slot left for later."""
    oversize: int
    """Calls admitted alone that would exceed the budget of a slot without anything else in it."""


@value(frozen=True, slots=True)
class RoundSummary:
    """One pass over the models with work: wall = active + switch, exactly (SPEC §6)."""

    index: int
    started_s: float
    ended_s: float
    predicted_s: float
    switch_s: float
    slots: tuple[SlotSummary, ...]
    overrun_s: float
    """Time past the bound, charged to the next round."""
    at_risk: bool
    """Its predicted or actual length passed the bound (Eq. 5)."""
    infeasible: bool
    """No division of the round meets T_TPOT and the bound together (Eq. 4)."""


@value(frozen=True, slots=True)
class Report:
    """A round is over; the host publishes and records it."""

    round: RoundSummary


Command = Admit | Resume | Stop | Stage | Unstage | Switch | Open | Close | Wait | Report
