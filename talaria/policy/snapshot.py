"""What an instance publishes about itself: versioned, immutable, and always a little old (SPEC §2)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from talaria.policy.calls import LineKey
from talaria.policy.timing import Timing
from talaria.policy.values import value


class Residency(str, Enum):
    """Where a model stands on an instance (SPEC §5.6). STAGED is PARKED with some weights already on the device."""

    ABSENT = "absent"
    PARKED = "parked"
    STAGED = "staged"
    ACTIVE = "active"


ABSENT: Final = Residency.ABSENT  # for the many that ask: CPython 3.11 looks up a member of an enumeration very slowly
PARKED: Final = Residency.PARKED
STAGED: Final = Residency.STAGED
ACTIVE: Final = Residency.ACTIVE


class Tier(str, Enum):
    """Router-visible state of a prefix (SPEC §5.2)."""

    DEVICE = "device"
    HOST = "host"
    MISSING = "missing"


DEVICE: Final = Tier.DEVICE
HOST: Final = Tier.HOST
MISSING: Final = Tier.MISSING


@value(frozen=True, slots=True)
class Capabilities:
    """What an instance can do; its scheduler and the router are told nothing else about its kind."""

    hot: bool = False
    session_prefill: bool = True
    hkvr: bool = True
    staging: bool = True
    inflight_kv: str = "swap"
    """``swap`` or ``recompute``: what happens to in-flight sequences when their slot ends (SPEC §6)."""
    max_running: int = 256
    max_resident_models: int = 8


@value(frozen=True, slots=True)
class LineState:
    """The cached prefix of one line: agreed tokens, and where the first of them that is not on the device lives."""

    tier: Tier
    tokens: int
    last_use_s: float


@value(frozen=True, slots=True)
class ModelSnapshot:
    """One model on one instance. ``next_slot_s`` counts from the snapshot's time and holds no switch cost."""

    residency: Residency
    coverage: float
    queued: int
    in_flight: int
    queued_work_s: float
    """Predicted prefill and restore seconds of the calls that wait."""
    next_slot_s: float
    activate_s: float
    """0 if active; advertised switch cost if parked or staged; full-open cost if absent."""
    free_kv_tokens: int
    weight_bytes: int
    """Added HBM footprint of one more replica here, all ranks (ΔW_m of Eq. 2)."""
    timing: Timing


@value(frozen=True, slots=True)
class InstanceSnapshot:
    """One instance at ``time_s``. ``seen_seq`` is the last submission this snapshot accounts for (SPEC §3.5)."""

    instance: str
    version: int
    time_s: float
    seen_seq: int
    healthy: bool
    capabilities: Capabilities
    models: Mapping[str, ModelSnapshot]
    lines: Mapping[LineKey, LineState]
    round_left_s: float
    round_load_s: float
    """Predicted length of the next round, with the work that waits now (Eq. 3)."""
    deadline_risk: int
    hbm_used_bytes: int
    hbm_capacity_bytes: int
    slack_bytes: int
    host_kv_bytes: int
    host_weight_bytes: int
