"""How fast single requests go through: the first 2,000 of Azure's conversation trace on one hot, single-model instance.

python benchmarks/azure.py TRACE        (azure_llm_2023_conv.csv.gz, in the importer's format ``azure``)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from measure import PROGRAM, cpu_s, report, run_process, timeout_us

from talaria.sim import config, scenario
from talaria.sim.run import plan, simulate

REQUESTS = 2000
SCENARIO = """
schema: talaria.scenario/1
name: azure
about: One hot instance serves single requests of one model, as they arrived.
profile: h200
models: [Qwen3-32B]
instances: [{{count: 1, pool: hot}}]
workload: {{trace: {trace}, first_calls: {requests}}}
arrivals: trace
"""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/azure.py TRACE")
    with tempfile.TemporaryDirectory() as name:
        trace, file = Path(name, "azure.jsonl.gz"), Path(name, "azure.yaml")
        run_process(*PROGRAM, "trace", "import", sys.argv[1], "--format", "azure", "-o", str(trace))
        file.write_text(SCENARIO.format(trace=trace, requests=REQUESTS), encoding="utf-8")
        resolved = plan(scenario.load(str(file)), config.get("talaria"))
        record = simulate(resolved, 0)
        assert len(record.calls) == REQUESTS
        took_s = min(cpu_s(lambda: simulate(resolved, 0)) for _ in range(5))
    event_us = timeout_us()
    report(
        "Azure conversations on one single-model instance",
        [
            ("requests per processor second", f"{REQUESTS / took_s:,.0f}", "at least 2,000"),
            ("kernel events per request", f"{record.events / REQUESTS:.1f}", ""),
            ("a raw SimPy timeout", f"{event_us:.2f} us", ""),
            ("a request, in raw timeouts", f"{took_s / REQUESTS * 1e6 / event_us:.0f}", ""),
        ],
    )


if __name__ == "__main__":
    main()
