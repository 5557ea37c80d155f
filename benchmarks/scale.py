"""Whether a large cluster costs more per call, and whether memory follows the calls: 64 instances against 8, equal load on each.

Every run is a process of its own. Memory per call is the difference of the peaks of two runs on 8 instances, one twice as
long as the other, over the calls between. Live sessions are the same in both, and so is the index of KV on devices and hosts,
which were full long before: what grows is what a call leaves behind, its own row and its share of the rows of slots, rounds
and switches. (On 64 instances that index is still filling after as many calls, up to what devices and hosts hold.) Computing
the metrics takes more for a moment, which is shown beside it. So does writing files, which is not measured: phases, samples of
the memory and the names of sessions are kept for them too.

    python benchmarks/scale.py [CALLS]      (100,000 by default: some two minutes)
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass

from measure import cpu_s, report, run_process, timeout_us

from talaria.report.metrics import metrics
from talaria.report.record import RunRecord
from talaria.sim import config, scenario
from talaria.sim.run import plan, simulate

SIZES = (8, 64)
SESSIONS_PER_INSTANCE = 5
MODELS = ("Qwen3-235B", "GLM5-nvfp4", "Qwen3.5-122B-A10B")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: processor microseconds of a call and of a raw timeout, peak memory of the process, and what of it are rows."""

    call_us: float
    timeout_us: float
    peak_bytes: int
    call_rows_bytes: int
    other_rows_bytes: int
    """Of slots, rounds and switches."""
    with_metrics_bytes: int
    """The peak once the metrics are computed as well."""


def measure(instances: int, calls: int) -> Measured:
    """Simulate ``calls`` calls on ``instances`` cold instances in this process."""
    document = {
        "schema": "talaria.scenario/1",
        "name": f"scale-{instances}",
        "about": "Cold instances that share three models, five sessions on each at any time.",
        "profile": "paper-tp8",
        "models": MODELS,
        "instances": [{"count": instances, "max_resident_models": len(MODELS)}],
        "workload": {"preset": "mixed", "models": MODELS, "sessions": max(1, calls // 8), "first_calls": calls},
        "gap_cap_s": 10,
        "arrivals": f"closed_pool:{SESSIONS_PER_INSTANCE * instances}",
    }
    resolved = plan(scenario.Scenario.model_validate(document), config.get("talaria"))
    records: list[RunRecord] = []
    took_s = cpu_s(lambda: records.append(simulate(resolved, 0)))
    peak_bytes, record = _peak_bytes(), records[0]
    other_rows_bytes = sum(rows.kept_bytes for rows in (record.slots, record.rounds, record.switches))
    metrics(record)
    return Measured(took_s / calls * 1e6, timeout_us(), peak_bytes, record.calls.kept_bytes, other_rows_bytes, _peak_bytes())


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_apart(instances: int, calls: int) -> Measured:
    """The same in a process of its own."""
    return Measured(**run_process(sys.executable, __file__, str(instances), str(calls)).json())


def main(calls: int) -> None:
    few, many = (measure_apart(size, calls) for size in SIZES)
    longer = measure_apart(SIZES[0], 2 * calls)
    grown_bytes = (longer.peak_bytes - few.peak_bytes) / calls
    call_rows_bytes = (longer.call_rows_bytes - few.call_rows_bytes) / calls
    other_rows_bytes = (longer.other_rows_bytes - few.other_rows_bytes) / calls
    with_metrics_bytes = (longer.with_metrics_bytes - few.with_metrics_bytes) / calls
    few_ratio, many_ratio = few.call_us / few.timeout_us, many.call_us / many.timeout_us
    report(
        f"{calls:,} calls",
        [
            (f"a call on {SIZES[0]} instances", f"{few.call_us:.0f} us", f"{few_ratio:.0f} raw timeouts"),
            (f"a call on {SIZES[1]} instances", f"{many.call_us:.0f} us", f"{many_ratio:.0f} raw timeouts"),
            (f"{SIZES[1]} instances over {SIZES[0]}, in raw timeouts", f"{many_ratio / few_ratio:.2f}", "at most 1.5"),
            ("memory that a further call leaves behind", f"{grown_bytes:.0f} bytes", "at most 64 bytes"),
            ("  of which the call's own row", f"{call_rows_bytes:.0f} bytes", ""),
            ("  of which rows of slots, rounds, switches", f"{other_rows_bytes:.0f} bytes", ""),
            ("  and takes while metrics are computed", f"{with_metrics_bytes:.0f} bytes", ""),
            (f"peak memory on {SIZES[1]} instances", f"{many.peak_bytes / 2**20:.0f} MiB", ""),
        ],
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        found = measure(int(sys.argv[1]), int(sys.argv[2]))
        print(json.dumps(asdict(found)))
    else:
        main(int(sys.argv[1]) if len(sys.argv) == 2 else 100_000)
