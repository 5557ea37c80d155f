"""Small clusters for the router's tests: one timing, terse builders of snapshots and calls, every default harmless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from talaria.policy.calls import Call, LineKey
from talaria.policy.knobs import Knobs
from talaria.policy.router import ROUTERS, Routed, Router, Usage
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, LineState, ModelSnapshot, Residency, Tier
from talaria.policy.timing import Timing

GIB = 1 << 30

TIMING = Timing(
    prefill_base_s=0.02, prefill_s_per_token=1e-4, prefill_s_per_token2=1e-9,
    decode_base_s=0.005, decode_s_per_sequence=0.0004, decode_s_per_context_token=1e-8,
    restore_base_s=0.01, restore_s_per_token=1e-5, swap_s_per_token=1e-5,
    d2d_switch_s=0.1, h2d_switch_s=2.0, open_s=30.0,
)  # fmt: skip
ACTIVATE_S = {Residency.ACTIVE: 0.0, Residency.STAGED: 0.5, Residency.PARKED: 2.0, Residency.ABSENT: 30.0}


def model(residency: Residency = Residency.ACTIVE, **changes: Any) -> ModelSnapshot:
    idle = ModelSnapshot(
        residency, coverage=0.0, queued=0, in_flight=0, queued_work_s=0.0, next_slot_s=0.0, activate_s=ACTIVATE_S[residency],
        free_kv_tokens=1_000_000, weight_bytes=50 * GIB, timing=TIMING,
    )  # fmt: skip
    return replace(idle, **changes)


def snapshot(instance: str, models: Mapping[str, ModelSnapshot], version: int = 1, time_s: float = 0.0, **changes: Any) -> InstanceSnapshot:
    idle = InstanceSnapshot(
        instance, version, time_s, seen_seq=0, healthy=True, capabilities=Capabilities(), models=models, lines={}, round_left_s=0.0,
        round_load_s=0.0, deadline_risk=0, hbm_used_bytes=0, hbm_capacity_bytes=180 * GIB, slack_bytes=0, host_kv_bytes=0,
        host_weight_bytes=0,
    )  # fmt: skip
    return replace(idle, **changes)


def key(session: str = "s", model_name: str = "m", line: str = "main", tenant: str = "t") -> LineKey:
    return LineKey(tenant, session, model_name, line)


def call(number: int, line_key: LineKey | None = None, prompt: int = 1000, reusable: int = 0, **changes: Any) -> Call:
    """A first call; with ``reusable`` tokens, the line's next one."""
    first = Call(number, line_key or key(), 0, 0.0, prompt, expected_output_tokens=100)
    if reusable:
        first = replace(first, turn=1, reusable_tokens=reusable)
    return replace(first, **changes)


def router(
    *snapshots: InstanceSnapshot, name: str = "full", nu: Mapping[str, float] | None = None, now_s: float = 0.0, **knobs: Any
) -> Router:
    """A router that has just observed ``snapshots``; knobs by field name."""
    made = ROUTERS[name]({item.instance: item.capabilities for item in snapshots}, replace(Knobs(), **knobs), nu)
    for item in snapshots:
        made.observe(item, now_s)
    return made


def routed(decision: object) -> Routed:
    assert isinstance(decision, Routed), decision
    return decision


def finish(made: Router, done: Call, instance: str, now_s: float, output: int = 100) -> None:
    made.completed(done, instance, Usage(done.prompt_tokens, done.reusable_tokens, output), now_s)


def held_line(tokens: int = 1100, tier: Tier = Tier.DEVICE) -> LineState:
    return LineState(tier, tokens, 0.0)
