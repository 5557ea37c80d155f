"""A comparison: the same scenario, workload and random numbers under several configurations, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from talaria.report.document import Document, compare_document
from talaria.report.statistics import paired
from talaria.sim import config as configs
from talaria.sim.batch import Batch, Case
from talaria.sim.config import Config
from talaria.sim.run import RunPlan

MECHANISMS = ("talaria", "no-sp", "no-hkvr", "h2d-only", "round-only")
"""Compared by default: the whole system, and without each of its mechanisms (SPEC §6)."""


def cases(names: Sequence[str], plan: Callable[[Config], RunPlan], out: Path | None) -> list[Case]:
    """One case per configuration, each with its own run directory under ``out``."""
    return [Case(name, plan(configs.get(name)), out / name if out else None) for name in names]


def document(batch: Batch, runs: dict[str, Document]) -> Document:
    """``talaria.compare/1`` of what ``batch`` has finished; differences are over the seeds that both sides finished."""
    return compare_document(runs, paired({label: batch.results[label] for label in runs}))
