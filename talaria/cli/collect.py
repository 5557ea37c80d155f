"""Runs a command's batch under a progress bar. Ctrl-C ends the jobs, not the command: what is finished is still shown and written."""

from __future__ import annotations

import resource
import sys

from talaria.cli.console import note, progress
from talaria.sim.batch import Batch

INTERRUPTED = 130


def collect(batch: Batch) -> int:
    """Run the batch's jobs; returns the exit code: 0, or 130 if interrupted."""
    outcomes = batch.run()
    with progress("simulating", len(batch.jobs)) as advance:
        try:
            for _ in outcomes:
                advance()
        except KeyboardInterrupt:
            outcomes.close()
            finished = sum(len(results) for results in batch.results.values())
            note(f"interrupted after {finished} of {len(batch.jobs)} runs")
            return INTERRUPTED
    for warning in batch.warnings:
        note(warning)
    return 0


def peak_rss_mib() -> float:
    """Largest resident memory of this process and of the workers it has ended, in MiB."""
    to_mib = 2**20 if sys.platform == "darwin" else 2**10  # getrusage counts bytes there, KiB elsewhere
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / to_mib
