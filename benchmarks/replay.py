"""What one published replay costs: 960 calls on ``paper-tp8``, full mechanism, decision log off.

The cost of a replay is the processor time of a ``talaria-sim run`` of 11 seeds less that of one, over 10, so that start-up
and imports count for nothing; the smaller of two such differences, since another program's work only ever adds.

    python benchmarks/replay.py

It measures the modules that ``talaria-sim`` uses here: after ``scripts/compile`` the compiled ones.
"""

from __future__ import annotations

import sys

from measure import PROGRAM, report, run_process, timeout_us

CALLS = 960


def modules() -> str:
    """``compiled`` or ``pure Python``: what the program that is measured runs."""
    path = run_process(sys.executable, "-c", "import talaria.sim.kernel as kernel; print(kernel.__file__)").output.strip()
    return "pure Python" if path.endswith(".py") else "compiled"


def main() -> None:
    command = (*PROGRAM, "run", "--scenario", "paper-tp8", "--json")
    replay_s, peak_mb = float("inf"), 0.0
    for _ in range(2):
        eleven, one = run_process(*command, "--seeds", "11"), run_process(*command, "--seed", "0")
        replay_s = min(replay_s, (eleven.cpu_s - one.cpu_s) / 10)
        peak_mb = max(peak_mb, one.json()["host"]["peak_rss_mib"] * 2**20 / 1e6)
    call_us, event_us = replay_s / CALLS * 1e6, timeout_us()
    report(
        f"one 960-call replay on paper-tp8, {modules()} modules",
        [
            ("processor seconds of a replay", f"{replay_s:.3f} s", "at most 0.12 s"),
            ("calls per processor second", f"{CALLS / replay_s:,.0f}", "at least 8,000"),
            ("peak memory of a run of one seed", f"{peak_mb:.0f} MB", "at most 150 MB"),
            ("a raw SimPy timeout", f"{event_us:.2f} us", ""),
            ("a call, in raw timeouts", f"{call_us / event_us:.0f}", ""),
        ],
    )


if __name__ == "__main__":
    main()
