"""What a fresh ``talaria-sim`` process costs before and beside the simulation: the best of five.

python benchmarks/startup.py
"""

from __future__ import annotations

import sys

from measure import PROGRAM, report, run_process


def best_s(*command: str) -> float:
    return min(run_process(*command).cpu_s for _ in range(5))


def main() -> None:
    bare_s = best_s(sys.executable, "-c", "pass")
    help_s, run_s = best_s(*PROGRAM, "--help"), best_s(*PROGRAM, "run", "--json")
    report(
        "a fresh process",
        [
            ("talaria-sim --help", f"{help_s:.2f} s", "at most 0.4 s"),
            ("talaria-sim run", f"{run_s:.2f} s", "at most 1.0 s"),
            ("the bare interpreter", f"{bare_s:.3f} s", ""),
            ("--help, in bare interpreters", f"{help_s / bare_s:.1f}", ""),
            ("run, in bare interpreters", f"{run_s / bare_s:.1f}", ""),
        ],
    )


if __name__ == "__main__":
    main()
