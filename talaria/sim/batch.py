"""Batches: cases (resolved runs) under the same seeds, job by job, here or in worker processes, each case with its own documents.

``run`` is a batch of one case, a comparison has one case per configuration, a sweep one per point.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from talaria import __version__
from talaria.policy.knobs import as_dict
from talaria.report.declog import DecisionLog
from talaria.report.document import Document, Host, run_document
from talaria.report.files import RunDirectory
from talaria.report.metrics import metrics
from talaria.report.record import RunRecord
from talaria.report.statistics import SeedResult, sct_by_session
from talaria.sim.interrupts import deferred
from talaria.sim.parallel import Pool, ordered_map
from talaria.sim.run import RunPlan, beyond_evidence, simulate


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a comparison or point of a sweep; ``directory`` is where its run directory shall appear, if anywhere."""

    label: str
    plan: RunPlan
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One case under one seed. ``keep_record`` keeps every row with its names, ``timeline`` also every phase."""

    case: Case
    seed: int
    keep_record: bool = False
    timeline: bool = False
    decisions: Path | None = None
    """Where the decision log goes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``cpu_s``: processor seconds of the simulation alone, without metrics and files."""

    job: Job
    result: SeedResult
    record: RunRecord | None
    cpu_s: float
    warnings: list[str]
    """Where profiles were extrapolated."""


def run_job(job: Job) -> Outcome:
    """Simulate one job and reduce it to what its batch keeps."""
    with DecisionLog(job.decisions) if job.decisions else nullcontext() as log:
        started_s = time.process_time()
        record = simulate(job.case.plan, job.seed, log=log, timeline=job.timeline, keep_names=job.keep_record)
        cpu_s = time.process_time() - started_s
    result = SeedResult(metrics(record), sct_by_session(record))
    return Outcome(job, result, record if job.keep_record else None, cpu_s, beyond_evidence(job.case.plan, record))


def provenance(plan: RunPlan) -> Document:
    """What else the numbers rest on: this version and the profiles, by content."""
    profiles = {item.profile.name: item.profile.hash for item in plan.instances}
    return {"version": __version__, "profiles": profiles}


class Batch:
    """Runs ``cases`` under ``seeds`` and keeps what is finished. A context manager: run directories appear in ``finish``, or never.

    ``by_seed`` takes all cases of a seed before the next seed, so that an interrupted comparison stays paired; otherwise case
    follows case, so that an interrupted sweep has whole points. The decision log and the timeline are those of the first seed.
    Raises InputError at once if a case's directory cannot be written.
    """

    def __init__(
        self, cases: Sequence[Case], seeds: Sequence[int], *, by_seed: bool, decisions: bool = False, timeline: bool = False
    ) -> None:
        self.cases, self.seeds = cases, seeds
        self.results: dict[str, list[SeedResult]] = {case.label: [] for case in cases}
        self.records: dict[str, list[RunRecord]] = {case.label: [] for case in cases if case.directory}
        self.warnings: dict[str, None] = {}
        """What the first run of each case warns of, each sentence once."""
        self._cpu_s: dict[str, list[float]] = {case.label: [] for case in cases}
        self._started_s = time.perf_counter()
        self._stack = ExitStack()
        self._directories: dict[str, RunDirectory] = {}
        try:
            for case in cases:
                if case.directory:
                    self._directories[case.label] = self._stack.enter_context(RunDirectory(case.directory, timeline=timeline))
        except BaseException:
            self._stack.close()
            raise
        pairs = [(case, seed) for seed in seeds for case in cases] if by_seed else [(case, seed) for case in cases for seed in seeds]
        self.jobs = [self._job(case, seed, decisions=decisions, timeline=timeline) for case, seed in pairs]

    def _job(self, case: Case, seed: int, *, decisions: bool, timeline: bool) -> Job:
        directory = self._directories.get(case.label)
        first = seed == self.seeds[0]
        log = directory.staging / "decisions.jsonl" if directory and decisions and first else None
        return Job(case, seed, keep_record=directory is not None, timeline=timeline and first, decisions=log)

    def run(self, pool: Pool | None = None) -> Generator[Outcome, None, None]:
        """Run the jobs in order; what each yields is already kept. Closing the generator ends them. ``pool``: not one of its own."""
        with closing(pool.map(run_job, self.jobs) if pool else ordered_map(run_job, self.jobs)) as outcomes:
            for outcome in outcomes:
                with deferred():
                    self._keep(outcome)
                yield outcome

    def _keep(self, outcome: Outcome) -> None:
        label = outcome.job.case.label
        if not self.results[label]:
            self.warnings.update(dict.fromkeys(outcome.warnings))
        self.results[label].append(outcome.result)
        self._cpu_s[label].append(outcome.cpu_s)
        if outcome.record is not None:
            self.records[label].append(outcome.record)
            self._directories[label].add(outcome.record)

    def finish(self, peak_rss_mib: float) -> dict[str, Document]:
        """The run documents of the cases with a finished seed, by label; their directories appear."""
        documents = {}
        for case in self.cases:
            if self.results[case.label]:
                documents[case.label] = self._document(case, peak_rss_mib)
                if case.label in self._directories:
                    self._directories[case.label].finish(documents[case.label])
        return documents

    def _document(self, case: Case, peak_rss_mib: float) -> Document:
        results, cpu_s, plan = self.results[case.label], self._cpu_s[case.label], case.plan
        return run_document(
            scenario=plan.scenario.name,
            config=plan.config.name,
            policy=as_dict(plan.knobs),
            trace={"workload": plan.workload, "models": plan.mapping, "arrivals": plan.arrivals},
            seeds=self.seeds[: len(results)],
            per_seed=[result.metrics for result in results],
            provenance=provenance(plan),
            host=Host(sum(cpu_s) / len(cpu_s), time.perf_counter() - self._started_s, peak_rss_mib),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
