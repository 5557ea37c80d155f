"""How long one placement takes on the cost path: p50 and p95 by cluster size, beside what numpy itself costs in this run.

The reference is a loop of ``OPERATIONS`` elementwise numpy operations on one float per instance, about what Eq. 1 and the
gates need at the least. Ratios to it can be compared between machines; microseconds cannot.

    python benchmarks/router.py
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np

from talaria.policy.calls import Call, LineKey
from talaria.policy.knobs import Knobs
from talaria.policy.router import ROUTERS, Routed, Router, Usage
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, ModelSnapshot, Residency
from talaria.policy.timing import Timing

SIZES = (8, 64, 1024)
MODELS = 3
CALLS = 2000
OPERATIONS = 20
LIMITS_US = {8: 30.0, 1024: 150.0}
"""What the p50 must not pass."""

TIMING = Timing(0.02, 1e-5, 1e-10, 0.005, 4e-4, 1e-9, 0.001, 1e-6, 1e-6, 0.1, 2.0, 30.0)


def snapshot(i: int, version: int, now_s: float, seen_seq: int) -> InstanceSnapshot:
    """Instance ``i`` with one model active, one parked and, on every fourth, one absent, so that every gate is asked."""
    models = {}
    for m in range(MODELS):
        absent = (i + m) % (4 * MODELS) == 1
        residency = Residency.ACTIVE if m == i % MODELS else Residency.ABSENT if absent else Residency.PARKED
        activate_s = {Residency.ACTIVE: 0.0, Residency.PARKED: 1.0, Residency.ABSENT: 30.0}[residency]
        work_s = 0.01 * ((7 * i + m) % 11)
        models[f"m{m}"] = ModelSnapshot(residency, 0.0, 2, 1, work_s, 0.5, activate_s, 1_000_000, 50 << 30, TIMING)
    return InstanceSnapshot(
        f"i{i}", version, now_s, seen_seq, True, Capabilities(), models, {}, 1.0, 2.0, 0, 100 << 30, 180 << 30, 8 << 30, 0, 0
    )  # fmt: skip


def router_of(size: int) -> Router:
    router = ROUTERS["full"]({f"i{i}": Capabilities() for i in range(size)}, replace(Knobs(), stale_after_s=600.0, tau_s=60.0))
    for i in range(size):
        router.observe(snapshot(i, 0, 0.0, 0), 0.0)
    router.prepare()
    return router


def measure(size: int) -> dict[str, list[float]]:
    """Seconds of each placement by cost, each observed snapshot, and each placement by lease."""
    router = router_of(size)
    taken: dict[str, list[float]] = {"cost": [], "observe": [], "lease": []}
    for number in range(CALLS):
        now_s = 0.01 * number
        first = Call(2 * number, LineKey("t", f"s{number}", f"m{number % MODELS}", "main"), 0, now_s, 20_000, 0, 100)
        began = perf_counter()
        routed = router.place(first, now_s)
        taken["cost"].append(perf_counter() - began)
        assert isinstance(routed, Routed) and routed.reason == "cost"
        seen = snapshot(int(routed.instance[1:]), 2 * number + 1, now_s, routed.seq)
        began = perf_counter()
        router.observe(seen, now_s)
        router.prepare()
        taken["observe"].append(perf_counter() - began)
        router.completed(first, routed.instance, Usage(20_000, 0, 100), now_s)
        second = replace(first, id=2 * number + 1, turn=1, prompt_tokens=21_000, reusable_tokens=20_100)
        began = perf_counter()
        returned = router.place(second, now_s)
        taken["lease"].append(perf_counter() - began)
        assert isinstance(returned, Routed) and returned.reason == "lease"
        router.observe(replace(seen, version=2 * number + 2, seen_seq=returned.seq), now_s)
        router.prepare()  # as a host does between calls
    return taken


def reference_us(size: int) -> float:
    """Median microseconds of ``OPERATIONS`` elementwise numpy operations on ``size`` floats."""
    values, taken = np.ones(size), []
    for _ in range(CALLS):
        began = perf_counter()
        for _ in range(OPERATIONS):
            values + values
        taken.append(perf_counter() - began)
    return float(np.median(taken)) * 1e6


def main() -> None:
    print(f"{'instances':>9} {'path':>8} {'p50 us':>8} {'p95 us':>8} {'numpy us':>9} {'p50/numpy':>10}")
    for size in SIZES:
        numpy_us = reference_us(size)
        for path, seconds in measure(size).items():
            p50, p95 = (float(value) * 1e6 for value in np.percentile(seconds, (50, 95), method="inverted_cdf"))
            limit = f"  at most {LIMITS_US[size]:g} us" if path == "cost" and size in LIMITS_US else ""
            print(f"{size:>9} {path:>8} {p50:>8.1f} {p95:>8.1f} {numpy_us:>9.2f} {p50 / numpy_us:>10.2f}{limit}")


if __name__ == "__main__":
    main()
