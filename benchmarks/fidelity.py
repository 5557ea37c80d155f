"""How far the simulator is from real engines: profile, replay, simulate and validate on one machine, with tiny models on the CPU.

    TALARIA_ENGINE_PYTHON=PYTHON python -m benchmarks.fidelity [--out DIR] [--sessions 24] [--repetitions 3] [--staged]

Everything goes through the console programs, as a user would do it on GPUs. The bar: the simulated median SCT is within the larger
of 15 % and twice the spread of the real repetitions. With ``--staged`` the models share an arena, one's weights are staged beside the
other's calls, so slowly that not every switch finds them all, and KV is kept on the host. To be run on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from talaria.workload.open import open_workload
from talaria.workload.rules import TraceHeader
from talaria.workload.trace import TraceFile, write_trace

CPU = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "cpu"
MODELS = ("qwen3", "llama")
ENVIRONMENT = {
    "PYTHONPATH": str(CPU / "standins"), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
WORK = {
    "preset": "quickstart", "models": list(MODELS), "depth_median": 4.0, "depth_cap": 8, "calls_per_model": None, "shared_tokens": 0,
    "first_median_tokens": 300.0, "first_sigma": 0.5, "output_median_tokens": 24.0, "output_sigma": 0.5, "output_cap_tokens": 64,
    "append_median_tokens": 60.0, "append_sigma": 0.5, "append_session_sigma": 0.3, "append_cap_tokens": 300,
    "compact_median_tokens": 300.0, "context_limit_tokens": 3000, "gap_median_s": 0.3, "long_gap_share": 0.0,
}  # fmt: skip
"""Agent sessions in small: what a core prefills and decodes in seconds."""


MEMORY = {"host_kv_gib": 0.25, "arena": {"managed_gib": 0.02, "chunk_kib": 16, "staging_gib_s": 0.004}}
"""A model's weights take most of a second."""
SHORT_ROUNDS = {"t_ttft": 0.8}
"""So that staging does not always come to its end."""


def cluster(python: str, models: Path, logs: Path, *, staged: bool) -> dict[str, Any]:
    return {
        "policy": {"knobs": SHORT_ROUNDS if staged else {}},
        "schema": "talaria.cluster/1",
        "name": "cpu-pair",
        "models": {name: {"path": str(models / name), "kv_tokens": 20_000} for name in MODELS},
        "instances": [{"name": "g0", "models": list(MODELS), "max_running": 16, **(MEMORY if staged else {})}],
        "engine": {
            "python": python, "arguments": ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"],
            "environment": ENVIRONMENT, "page_tokens": 16, "start_timeout_s": 300.0, "log_dir": str(logs),
        },
    }  # fmt: skip


def prepare(directory: Path, python: str, sessions: int, *, staged: bool = False) -> None:
    """``cluster.yaml`` and ``trace.jsonl`` in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    models = directory / "models"
    if not models.exists():
        subprocess.run([python, str(CPU / "models.py"), str(models)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    document = cluster(python, models.resolve(), (directory / "logs").resolve(), staged=staged)
    (directory / "cluster.yaml").write_text(yaml.safe_dump(document))
    workload = open_workload({**WORK, "sessions": sessions}, 1)
    write_trace(directory / "trace.jsonl", TraceHeader("small-agents"), workload.sessions())


def program(name: str, directory: Path, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a console program, run in ``directory``."""
    module = {"talaria-sim": "talaria.cli.main", "talaria-gpu": "talaria.cli.gpu"}[name]
    command = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True)
    if done.returncode not in codes:
        raise SystemExit(f"{name} {' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def fidelity(directory: Path, repetitions: int) -> dict[str, Any]:
    """The validation document of a prepared directory."""
    replay = ("--trace", "trace.jsonl", "--arrivals", "closed_pool:4", "--seeds", str(repetitions), "--out")
    sessions = TraceFile(directory / "trace.jsonl").sessions()
    longest = max(call.prompt_tokens + call.output_tokens for session in sessions for call in session.calls)
    program("talaria-gpu", directory, "profile", "cluster.yaml", "-o", "measured.json", "--max-tokens", str(longest))
    document = yaml.safe_load((directory / "cluster.yaml").read_text())
    document["policy"]["profile"] = str((directory / "measured.json").resolve())
    (directory / "cluster.yaml").write_text(yaml.safe_dump(document))
    program("talaria-gpu", directory, "run", "cluster.yaml", *replay, "gpu")
    program("talaria-sim", directory, "run", "--scenario", "./measured-scenario.yaml", *replay, "sim")
    printed = program("talaria-gpu", directory, "validate", "sim", "gpu", "--out", "validation", "--json", codes=(0, 1))
    validated: dict[str, Any] = json.loads(printed)
    return validated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fidelity"))
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--staged", action="store_true")
    asked = parser.parse_args()
    prepare(asked.out, os.environ.get("TALARIA_ENGINE_PYTHON", sys.executable), asked.sessions, staged=asked.staged)
    found = fidelity(asked.out, asked.repetitions)
    rows = {row["metric"]: row for row in found["metrics"]}
    for name in ("sct_p50_s", "sct_p95_s", "ttft_p50_s", "return_ttft_p50_s", "tpot_p50_s", "switch_p50_s", "kv_device", "sp_admitted"):
        row = rows[name]
        print(f"{name:20} simulated {row['simulated']} measured {row['measured']} spread {row['spread']} error {row['error_share']}")
    if (mix := found["switches"]) is not None:
        for path, measured in mix["measured"].items():
            print(f"switches, {path:10} simulated {mix['simulated'][path]:.1%} measured {measured:.1%}")
        print(f"{mix['difference']:.1%} of switches differ")
    sessions, bar = found["sessions"], found["bar"]
    print(f"per session: mean absolute error {sessions['mae_s']:.3f} s ({sessions['mae_share']:.1%}), p95 {sessions['p95_s']:.3f} s")
    print(f"decisions: {found['decisions']['count']} replayed, {found['decisions']['differences']} differences")
    print(f"bar: sct_p50_s off by {bar['error']:.3f} s, allowed {bar['allowed_error']:.3f} s: {'met' if bar['passed'] else 'NOT MET'}")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
