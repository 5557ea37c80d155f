"""Whether gateway and agent keep to their memory over many short calls of sessions that end, and lose none.

    python -m benchmarks.soak [--calls 100000] [--workers 64]

The load runs in tenths. Resident memory is sampled after each, once idle sessions are forgotten; the slope is that of the later
half, where pools and caches have found their size.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.gateway import send
from benchmarks.measure import report
from tests.gpu.cluster import KEY, Cluster, stub_document

PARTS = 10
SESSION_IDLE_S = 2.0
SLOPE_BYTES = 64.0
"""Most growth of a process per call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        instances = [{"name": "hot", "pool": "hot", "models": ["m0"]}, {"name": "cold", "models": ["m0", "m1"]}]
        document = stub_document(
            Path(directory), instances, step_s=0.0, policy={"knobs": {"tau": 1.0}},
            gateway={"limits": {"session_idle_s": SESSION_IDLE_S}},
        )  # fmt: skip
        with Cluster(Path(directory), document) as cluster:
            soak(cluster, given.calls, given.workers)


def soak(cluster: Cluster, calls: int, workers: int) -> None:
    processes = {"gateway": cluster.processes("gateway")[0], "agent": cluster.agent("hot"), "agent of the cold one": cluster.agent("cold")}
    outcomes: dict[str, int] = {}
    sampled: dict[str, list[int]] = {name: [] for name in processes}
    began_s = time.perf_counter()
    for part in range(PARTS):
        seen = send({
            "url": cluster.url, "key": KEY, "calls": calls // PARTS, "workers": workers, "sessions": workers, "turns": 3, "tokens": 4,
            "body_bytes": 1024, "model": "m1" if part % 2 else "m0", "seed": part,
        })  # fmt: skip
        for what, count in seen["outcomes"].items():
            outcomes[what] = outcomes.get(what, 0) + count
        time.sleep(2 * SESSION_IDLE_S)
        for name, process in processes.items():
            sampled[name].append(process.rss_bytes())
        print(f"{(part + 1) * calls // PARTS} calls:", {name: f"{sizes[-1] >> 20} MiB" for name, sizes in sampled.items()}, flush=True)
    rows = [
        ("completed", f"{outcomes.get('completed', 0)} of {calls}", "all"),
        ("accounted", f"{sum(outcomes.values())}", f"{calls}"),
        ("calls per second, pauses included", f"{calls / (time.perf_counter() - began_s):.0f}", ""),
    ]
    for name, sizes in sampled.items():
        later = sizes[PARTS // 2 :]
        slope = float(np.polyfit(np.arange(len(later)) * calls / PARTS, later, 1)[0])
        rows.append((f"{name}: memory at the end", f"{sizes[-1] >> 20} MiB", ""))
        rows.append((f"{name}: growth per call", f"{slope:.0f} B", f"at most {SLOPE_BYTES:g} B"))
    report(f"{calls} calls", rows)


if __name__ == "__main__":
    main()
