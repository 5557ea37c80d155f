"""What every benchmark of the simulator shares: processor seconds of code and of processes, and the kernel's own speed.

The yardstick is a process that only waits: SimPy timeouts, the least that a kernel event costs on this machine at this
moment. Ratios to it can be compared between machines and between busy and quiet hours; seconds cannot.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from simpy.core import Environment
from simpy.events import Event, Timeout

TIMEOUTS = 100_000
PROGRAM = (sys.executable, "-c", "from talaria.cli.main import main; main()")
"""``talaria-sim`` under this interpreter."""


def cpu_s(work: Callable[[], object]) -> float:
    """Processor seconds that ``work`` takes in this process."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def timeout_us() -> float:
    """Processor microseconds of one SimPy timeout: the best of five runs."""

    def waits(env: Environment) -> Generator[Event, Any, None]:
        for _ in range(TIMEOUTS):
            yield Timeout(env, 1.0)

    def run() -> None:
        env = Environment()
        env.process(waits(env))
        env.run()

    return min(cpu_s(run) for _ in range(5)) / TIMEOUTS * 1e6


@dataclass(frozen=True, slots=True)
class Finished:
    """A process that has ended well: its processor seconds, those of its workers included, and what it printed."""

    cpu_s: float
    output: str

    def json(self) -> Any:
        return json.loads(self.output)


def run_process(*command: str) -> Finished:
    """Run a command to its end; ends this program with the command's messages if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode:
        sys.exit(finished.stderr)
    return Finished(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, finished.stdout)


def report(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print (what, measured, bar) rows under ``title``."""
    print(title)
    for what, measured, bar in rows:
        print(f"  {what:<44} {measured:>14}   {bar}")
