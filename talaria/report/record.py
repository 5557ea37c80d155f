"""What a run leaves behind, in columns: one row per call, round, slot and switch. The same for both worlds.

Durations are seconds as float32 (relative error 6e-8), absolute times float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from talaria.report.columns import Columns

OUTCOMES = ("completed", "shed", "failed")
REASONS = (
    "lease", "cost", "spill", "queue", "sticky", "pressure", "rotation", "health",
    "group", "backlog", "startup", "exploit", "explore", "ttft", "prefix",
)  # fmt: skip
"""Why a call went where it went."""
PATHS = ("d2d", "partial", "h2d", "open")
PHASES = ("switch", "P", "D1", "SP", "D", "Dfin", "linger", "staging")
"""Of slots; the last one goes on beside them, and belongs to the model that is staged."""

FLAG_RETURN = 1  # a continuation
FLAG_RESIDENCY_HIT = 2  # its model was active, staged or resident on the chosen instance at placement
FLAG_OPEN = 4  # its model was absent there at placement
FLAG_AVOIDABLE = 8  # ... although another healthy instance had that model resident
FLAG_SAME_INSTANCE = 16  # a return placed on the instance that served the line's previous call
FLAG_SP = 32  # admitted by SP (else by P, or not at all)
FLAG_LEASE_HIT = 64  # routed by a live lease
FLAG_WARMUP = 128  # outside the measured window

KV_DEVICE, KV_HOST, KV_MISSING = 0, 1, 2

NO_INSTANCE = 0xFFFF
"""In place of an instance: the call was never placed."""
NO_MODEL = -1
"""In place of a switch's source: no model was active."""


def call_columns() -> Columns:
    return Columns(
        session="I", line="H", turn="H", model="B", instance="H", outcome="B", reason="B", flags="B", parked="B",
        rounds_waited="B", kv_state="B",
        enqueued_s="d",  # intended enqueue time
        placed_s="f",  # enqueue → submitted to an instance (durations from enqueued_s)
        admitted_s="f",  # enqueue → forwarded to the engine
        ttft_s="f",  # enqueue → first token
        e2e_s="f",  # enqueue → last token, or the end as shed or failed
        prompt_tokens="I", device_tokens="I", host_tokens="I", recomputed_tokens="I", output_tokens="I",
    )  # fmt: skip


def round_columns() -> Columns:
    return Columns(
        instance="H", round="I", started_s="d", wall_s="d", active_s="d", switch_s="d", predicted_s="d", slots="B",
        sp_admitted="H", parked="H", deadline_risk="H", infeasible="B",
    )  # fmt: skip


def slot_columns() -> Columns:
    """``prefill_s``/``decode_s``/``sp_s``/``linger_s`` are measured engine-busy (or lingering) seconds of the slot."""
    return Columns(
        instance="H", round="I", model="B", opened_s="d", closed_s="d", prefill_s="f", sp_s="f", decode_s="f", linger_s="f",
        p_admitted="H", sp_admitted="H", parked="H",
    )  # fmt: skip


def switch_columns() -> Columns:
    return Columns(
        instance="H", round="I", source="b", target="B", started_s="d", total_s="f", p1_s="f", p2_s="f", p3_s="f", p4_s="f",
        p5_s="f", path="B", coverage="f", dirty="f", d2d_bytes="Q", h2d_bytes="Q",
    )  # fmt: skip


def phase_columns() -> Columns:
    """Only kept when a timeline is asked for."""
    return Columns(instance="H", model="B", phase="B", started_s="d", ended_s="d")


def hbm_columns() -> Columns:
    """The footprint of one GPU of an instance, sampled where it changes. Only kept for a timeline or an output directory."""
    return Columns(instance="H", time_s="d", weights_bytes="Q", kv_bytes="Q", staged_bytes="Q")


@dataclass(slots=True)
class RunRecord:
    """One simulated or real run of one seed, complete: everything that ``report`` needs and nothing else."""

    scenario: str
    config: str
    seed: int
    models: tuple[str, ...]
    instances: tuple[str, ...]
    calls: Columns = field(default_factory=call_columns)
    rounds: Columns = field(default_factory=round_columns)
    slots: Columns = field(default_factory=slot_columns)
    switches: Columns = field(default_factory=switch_columns)
    phases: Columns | None = None
    session_names: list[str] | None = None
    """Kept only when files are written; rows refer to sessions by number."""
    session_parents: dict[int, int] = field(default_factory=dict)
    leases_granted: int = 0
    leases_used: int = 0
    """Returns routed by their lease."""
    leases_unused: int = 0
    """No return came to the leasing instance before the lease's expiry (SPEC §6); discarded leases of returns that
    came in time do not count."""
    restore_skips: dict[str, int] = field(default_factory=dict)
    """Restores declined for an incomplete recurrent state, by family."""
    host_capacity_misses: int = 0
    """Reusable tokens lost because the host registry had evicted them: counted per call."""
    peak_hbm_bytes: int = 0
    """Largest per-GPU footprint seen."""
    hbm_samples: Columns | None = None
    """``hbm_columns``; only with a timeline or an output directory."""
    largest_batch: dict[str, int] = field(default_factory=dict)
    """Most sequences in one decode step of any instance, by model."""
    deadline_risk: int = 0
    makespan_s: float = 0.0
    events: int = 0
    """Events that the simulator's kernel processed; 0 on hardware."""
