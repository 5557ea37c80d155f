"""What a tuning study costs: the default one of ``talaria-sim tune``, three scenarios over three draws in each trial, on two processes.

Trials per minute are of the wall: from a study of 60 trials less one of 4, so that start-up, validation and figures count for
nothing. Processor seconds of a trial say what two idle cores would do on a busy machine.

    python benchmarks/tuning.py

It measures the modules that ``talaria-sim`` uses here: after ``scripts/compile`` the compiled ones.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from measure import PROGRAM, report, run_process, timeout_us
from replay import modules

FEW, MANY, CORES = 4, 60, 2


def study(trials: int, place: Path) -> tuple[float, float, dict[str, int]]:
    """Wall and processor seconds of a whole command, and its counts of trials."""
    began_s = time.perf_counter()
    finished = run_process(
        *PROGRAM, "tune", "--trials", str(trials), "--jobs", str(CORES), "--out", str(place / str(trials)), "--json"
    )  # fmt: skip
    return time.perf_counter() - began_s, finished.cpu_s, finished.json()["trials"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        few_wall_s, few_cpu_s, _ = study(FEW, Path(folder))
        wall_s, cpu_s, counts = study(MANY, Path(folder))
    trials = MANY - FEW
    trial_s = (cpu_s - few_cpu_s) / trials
    report(
        f"the default study of talaria-sim tune, {modules()} modules",
        [
            ("trials a minute, by the wall", f"{60 * trials / (wall_s - few_wall_s):.0f}", "at least 60 on two idle cores"),
            ("processor seconds of a trial", f"{trial_s:.2f} s", "at most 2 s: 60 a minute on two cores"),
            ("of the trials, stopped early", f"{counts['pruned'] / counts['finished']:.0%}", ""),
            ("a trial, in thousands of raw timeouts", f"{trial_s / timeout_us() * 1e3:,.0f}", ""),
        ],
    )


if __name__ == "__main__":
    main()
