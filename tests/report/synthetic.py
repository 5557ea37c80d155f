"""Run records made by hand: a small one whose every metric can be worked out on paper, and a larger plausible one."""

from __future__ import annotations

import numpy as np

from talaria.report import record as columns
from talaria.report.record import (
    FLAG_AVOIDABLE,
    FLAG_LEASE_HIT,
    FLAG_OPEN,
    FLAG_RESIDENCY_HIT,
    FLAG_RETURN,
    FLAG_SAME_INSTANCE,
    FLAG_SP,
    FLAG_WARMUP,
    KV_DEVICE,
    KV_HOST,
    KV_MISSING,
    OUTCOMES,
    PATHS,
    PHASES,
    REASONS,
    RunRecord,
)

MODELS = ("alpha", "beta")
INSTANCES = ("cold-0", "cold-1")


def add_call(
    record: RunRecord,
    session: int,
    turn: int,
    enqueued_s: float,
    ttft_s: float,
    e2e_s: float,
    *,
    output_tokens: int = 1,
    flags: int = 0,
    outcome: str = "completed",
    kv: int = KV_MISSING,
    line: int = 0,
    model: int = 0,
    instance: int = 0,
    reason: str = "cost",
    placed_s: float = 0.0,
    admitted_s: float = 0.0,
    rounds_waited: int = 0,
    parked: int = 0,
    tokens: tuple[int, int, int, int] = (100, 0, 0, 0),
) -> None:
    record.calls.append(
        session, line, turn, model, instance, OUTCOMES.index(outcome), REASONS.index(reason), flags, parked, rounds_waited, kv,
        enqueued_s, placed_s, admitted_s, ttft_s, e2e_s, *tokens, output_tokens,
    )  # fmt: skip


def small_record(config: str = "talaria") -> RunRecord:
    """Nine measured calls of four top-level sessions and one child, after one warm-up call; all times exact in float32."""
    hit, back = FLAG_RESIDENCY_HIT, FLAG_RETURN
    record = RunRecord("by-hand", config, 0, MODELS, INSTANCES)
    add_call(record, 4, 0, 1.0, 9.0, 9.5, output_tokens=2, flags=FLAG_WARMUP | FLAG_OPEN, rounds_waited=7)
    # Session 0 with its child 1: 10 → 21 s, so SCT 11; the child's own SCT is 6.5.
    add_call(record, 0, 0, 10.0, 2.0, 4.0, output_tokens=5, flags=FLAG_OPEN, placed_s=0.5, admitted_s=1.0)
    add_call(record, 1, 0, 14.5, 0.5, 6.5, output_tokens=1, flags=hit, model=1)
    add_call(
        record, 0, 1, 15.0, 1.0, 3.0, output_tokens=11, kv=KV_DEVICE, reason="lease", parked=1, tokens=(300, 200, 0, 0),
        flags=back | hit | FLAG_SAME_INSTANCE | FLAG_LEASE_HIT | FLAG_SP,
    )  # fmt: skip
    # Session 2: 12 → 35 s, so SCT 23.
    add_call(record, 2, 0, 12.0, 4.0, 5.0, output_tokens=3, flags=FLAG_OPEN | FLAG_AVOIDABLE, instance=1, rounds_waited=2)
    add_call(
        record, 2, 1, 20.0, 8.0, 10.0, output_tokens=6, kv=KV_HOST, instance=1, parked=2, tokens=(400, 0, 300, 0),
        flags=back | hit | FLAG_SAME_INSTANCE,
    )  # fmt: skip
    add_call(record, 2, 2, 31.0, 3.0, 4.0, output_tokens=3, kv=KV_MISSING, flags=back | hit, tokens=(500, 0, 0, 400))
    # Session 3 loses a call to overload, session 5 one to a failure: neither has an SCT.
    add_call(record, 3, 0, 16.0, 1.0, 2.0, output_tokens=2, flags=hit)
    add_call(record, 3, 1, 19.0, 0.0, 0.0, output_tokens=0, flags=back, outcome="shed")
    add_call(record, 5, 0, 21.0, 0.0, 5.0, output_tokens=0, flags=hit, outcome="failed")
    record.session_parents = {1: 0}
    record.session_names = ["first", "first/child", "second", "shed", "warm", "failed"]

    # instance, round, started, wall, active, switch, predicted, slots, admitted, parked, risk, infeasible
    record.rounds.append(0, 0, 1.0, 5.0, 4.0, 1.0, 5.0, 1, 9, 9, 0, 0)
    record.rounds.append(0, 1, 10.0, 14.0, 7.75, 6.25, 12.0, 2, 1, 2, 1, 0)
    record.rounds.append(1, 0, 24.0, 11.0, 7.75, 3.25, 9.0, 2, 0, 1, 0, 1)

    # instance, round, source, target, started, total, five phases, path, coverage, dirty, D2D bytes, H2D bytes
    for number, (started_s, total_s, path) in enumerate(
        [(1.0, 1.0, "h2d"), (10.0, 5.0, "open"), (15.0, 0.25, "d2d"), (16.0, 1.0, "partial"), (24.0, 2.0, "h2d"), (27.0, 1.25, "partial")]
    ):
        instance, number_of_round = int(started_s >= 24.0), int(10.0 <= started_s < 24.0)
        phases = (0.0625, total_s - 0.125, 0.0, 0.0625, 0.0)
        record.switches.append(
            instance, number_of_round, -1 if path == "open" else number % 2, (number + 1) % 2, started_s, total_s, *phases,
            PATHS.index(path), 0.5, 0.25, 10**9, 10**9,
        )  # fmt: skip

    # instance, round, model, opened, closed, prefill, sp, decode, linger, P admitted, SP admitted, parked
    record.slots.append(0, 1, 0, 15.0, 18.0, 1.0, 0.5, 1.0, 0.5, 1, 1, 1)
    record.slots.append(0, 1, 1, 18.0, 24.0, 1.0, 0.0, 3.0, 0.0, 1, 0, 1)
    record.slots.append(1, 0, 0, 26.0, 35.0, 3.0, 0.0, 4.0, 0.75, 1, 0, 1)

    record.phases = columns.phase_columns()
    record.phases.append(0, 0, PHASES.index("P"), 15.0, 16.0)
    record.phases.append(0, 0, PHASES.index("SP"), 16.0, 16.5)
    record.leases_granted, record.leases_used, record.leases_unused = 4, 1, 3
    record.restore_skips = {"recurrent": 2, "mla": 1}
    record.host_capacity_misses = 5
    record.peak_hbm_bytes = 3 * 2**29
    record.deadline_risk = 1
    record.makespan_s = 35.0
    record.events = 123
    return record


SMALL_METRICS: dict[str, float] = {
    "sct_p50_s": 11.0,  # {11, 23}: rank ceil(2·0.5) = 1
    "sct_p95_s": 23.0,  # rank ceil(2·0.95) = 2
    "sct_mean_s": 17.0,
    "ttft_p50_s": 2.0,  # {0.5, 1, 1, 2, 3, 4, 8}: rank ceil(3.5) = 4
    "ttft_p95_s": 8.0,  # rank ceil(6.65) = 7
    "return_ttft_p50_s": 3.0,  # {1, 3, 8}
    "return_ttft_p95_s": 8.0,
    "tpot_p50_s": 0.5,  # {2/10, 2/5, 2/4, 1/2, 1/2, 1/1}: rank 3
    "rounds": 2.0,
    "round_wall_s": 25.0,
    "active_s": 15.5,
    "switch_s": 9.5,
    "switch_share": 0.38,
    "switches": 4.0,
    "switch_p50_s": 1.0,  # {0.25, 1, 1.25, 2}
    "switch_mean_s": 1.125,
    "switch_p95_s": 2.0,
    "path_d2d": 0.25,
    "path_partial": 0.5,
    "path_h2d": 0.25,
    "sp_admitted": 1.0,
    "sp_parked": 3.0,
    "sp_admission_rate": 0.25,
    "events_per_round_admitted": 0.5,
    "events_per_round_deferred": 1.5,
    "model_opens": 2.0,
    "avoidable_opens": 1.0,
    "same_instance_return": 2 / 3,  # of three placed continuations
    "residency_hit": 0.75,  # six of eight placed calls
    "unused_lease": 0.75,
    "lease_hit": 1 / 3,
    "kv_device": 1 / 3,
    "kv_host": 1 / 3,
    "kv_missing": 1 / 3,
    "restore_skips": 3.0,
    "host_capacity_misses": 5.0,
    "peak_hbm_gib": 1.5,
    "deadline_risk": 1.0,
    "max_wait_rounds": 2.0,
    "sessions_completed": 2.0,
    "calls_completed": 7.0,
    "calls_shed": 1.0,
    "calls_failed": 1.0,
    "makespan_s": 35.0,
    "events": 123.0,
}
"""The metrics of ``small_record``: exactly the names of the command line's contract, in its order."""


def empty_record() -> RunRecord:
    """A run in which nothing happened."""
    return RunRecord("by-hand", "talaria", 0, MODELS, INSTANCES)


def plausible_record(config: str = "talaria", seed: int = 0, *, sessions: int = 30, slowdown: float = 1.0) -> RunRecord:
    """A run shaped like a TP=8 replay: three models on one instance, rounds of three slots, long sessions."""
    rng = np.random.default_rng(seed)
    record = RunRecord("plausible", config, seed, ("Qwen3-235B", "GLM5-nvfp4", "Qwen3.5-122B-A10B"), ("cold-0",))
    record.session_names = [f"issue-{number:02d}" for number in range(sessions)]
    record.phases = columns.phase_columns()
    record.hbm_samples = columns.hbm_columns()
    for session in range(sessions):
        now_s = float(rng.uniform(0.0, 900.0))
        prompt = 13_000
        for turn in range(int(rng.integers(8, 40))):
            ttft_s = float(rng.choice([rng.lognormal(-0.6, 0.4), rng.lognormal(2.0, 0.4)], p=[0.7, 0.3])) * slowdown
            e2e_s = ttft_s + float(rng.lognormal(1.0, 0.6)) * slowdown
            kv = KV_DEVICE if ttft_s < 1 else KV_HOST
            flags = FLAG_RESIDENCY_HIT | (FLAG_RETURN | FLAG_SAME_INSTANCE | FLAG_LEASE_HIT if turn else 0)
            add_call(
                record, session, turn, now_s, ttft_s, e2e_s, model=session % 3, flags=flags, kv=kv, placed_s=ttft_s * 0.01,
                admitted_s=ttft_s * 0.6, output_tokens=150, tokens=(prompt, prompt - 900 if turn else 0, 0, 0),
            )  # fmt: skip
            prompt += 900
            now_s += e2e_s + float(rng.lognormal(-1.0, 0.65))
    _add_rounds(record, rng, end_s=1600.0 * slowdown)
    record.leases_granted, record.leases_used, record.leases_unused = len(record.calls), 400, 120
    record.peak_hbm_bytes = int(177.1 * 2**30)
    record.makespan_s = 1600.0 * slowdown
    record.events = 3500
    return record


def _add_rounds(record: RunRecord, rng: np.random.Generator, end_s: float) -> None:
    assert record.phases is not None and record.hbm_samples is not None
    now_s, number = 0.0, 0
    while now_s < end_s:
        started_s, switched_s = now_s, 0.0
        for model in range(3):
            total_s = float(rng.choice([0.106, rng.uniform(0.5, 1.6), 2.0], p=[0.2, 0.6, 0.2]))
            path = "d2d" if total_s < 0.2 else "h2d" if total_s >= 2.0 else "partial"
            record.switches.append(
                0, number, (model - 1) % 3, model, now_s, total_s, 0.03, total_s - 0.04, 0.001, 0.009, 0.0, PATHS.index(path),
                1.0 - total_s / 2.0, 0.1, 10**10, 10**10,
            )  # fmt: skip
            record.phases.append(0, model, PHASES.index("switch"), now_s, now_s + total_s)
            now_s += total_s
            switched_s += total_s
            parts = [float(value) for value in rng.uniform(0.2, 1.6, 4) * rng.choice([0.4, 1.0, 1.5])]
            opened_s = now_s
            for phase, part_s in zip(("P", "D1", "SP", "linger"), parts, strict=True):
                record.phases.append(0, model, PHASES.index(phase), now_s, now_s + part_s)
                now_s += part_s
            prefill_s, decode_s, sp_s, linger_s = parts
            record.slots.append(0, number, model, opened_s, now_s, prefill_s, sp_s, decode_s, linger_s, 2, 3, 1)
            used = int(rng.uniform(20, 60) * 2**30)
            record.hbm_samples.append(0, now_s, int((58, 46, 30)[model] * 2**30), used, int(rng.uniform(5, 40) * 2**30))
        wall_s = now_s - started_s
        record.rounds.append(0, number, started_s, wall_s, wall_s - switched_s, switched_s, wall_s * 0.95, 3, 9, 3, int(wall_s > 10), 0)
        number += 1
