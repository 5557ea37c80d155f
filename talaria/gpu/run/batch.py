"""Policies in turn under the same trace: repetition by repetition, each policy with its own documents, as the simulator's batches."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from talaria import __version__
from talaria.gpu.run.client import Client, Endpoint
from talaria.gpu.run.execute import repetition
from talaria.gpu.run.kept import Kept
from talaria.gpu.run.plan import Case, ReplayPlan
from talaria.policy.knobs import as_dict
from talaria.report.document import Document, Host, run_document
from talaria.report.files import RunDirectory
from talaria.report.metrics import metrics
from talaria.report.record import RunRecord
from talaria.report.statistics import SeedResult, sct_by_session


@dataclass(slots=True)
class Batch:
    """``kept`` holds finished repetitions. ``note`` is told what a user must know."""

    plan: ReplayPlan
    cases: Sequence[Case]
    kept: Kept
    note: Callable[[str], None]
    records: dict[str, list[RunRecord]] = field(default_factory=dict)
    """By case, the seeds that are finished in order; likewise below."""
    done: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    results: dict[str, list[SeedResult]] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.perf_counter)

    def calls(self) -> int:
        """What is left to send."""
        each = sum(len(session.calls) for session in self.plan.workload().sessions())
        return each * sum(self.kept.finished(case.label, seed) is None for case in self.cases for seed in self.plan.seeds)

    async def run(self, endpoint: Endpoint, advance: Callable[[], None]) -> None:
        """All cases of a seed before the next seed, so that what is finished can be compared. Errors as ``repetition``."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            client = Client(http, endpoint)
            vocabulary: Mapping[str, Sequence[int]] = {}
            for seed in self.plan.seeds:
                for case in self.cases:
                    if self.kept.finished(case.label, seed) is not None:
                        continue
                    vocabulary = vocabulary or {model: await client.vocabulary(model) for model in sorted({*self.plan.mapping.values()})}
                    log = self.kept.begin(case.label, seed) / "decisions.jsonl"
                    self.kept.keep(case.label, seed, await repetition(client, self.plan, case, seed, vocabulary, log, advance))

    def finish(self, provenance: Document, peak_rss_mib: float) -> dict[str, Document]:
        """The run documents of the cases with a finished repetition, by label; their directories appear."""
        documents = {}
        for case in self.cases:
            self._collect(case)
            if self.records[case.label]:
                documents[case.label] = document = self._document(case, provenance, peak_rss_mib)
                if case.directory is not None:
                    self._write(case, case.directory, document)
        return documents

    def _collect(self, case: Case) -> None:
        found = [self.kept.finished(case.label, seed) for seed in self.plan.seeds]
        finished = [each for each in found if each is not None]
        self.records[case.label] = [record for record, _ in finished]
        self.done[case.label] = [done for _, done in finished]
        self.results[case.label] = [SeedResult(metrics(record), sct_by_session(record)) for record, _ in finished]
        for record, done in finished:
            if done["differences"]:
                self.note(f"{case.label}, seed {record.seed}: {done['differences']} decisions came out differently when replayed")
            for warning in done["warnings"]:
                self.note(f"{case.label}, seed {record.seed}: {warning}")

    def _document(self, case: Case, provenance: Document, peak_rss_mib: float) -> Document:
        records, done = self.records[case.label], self.done[case.label]
        cpu_s = sum(each["cpu_s"] for each in done) / len(done)
        return run_document(
            scenario=records[0].scenario,
            config=case.label,
            policy=as_dict(case.knobs),
            trace=self.plan.document(),
            seeds=[record.seed for record in records],
            per_seed=[result.metrics for result in self.results[case.label]],
            provenance={"version": __version__, "began_s": [each["began_s"] for each in done], **provenance},
            host=Host(cpu_s, time.perf_counter() - self._started_s, peak_rss_mib),
        )

    def _write(self, case: Case, path: Path, document: Document) -> None:
        """The decision log and the timeline are those of the first seed."""
        first = self.kept.place(case.label, self.records[case.label][0].seed)
        with RunDirectory(path) as directory:
            for record in self.records[case.label]:
                directory.add(record)
            for name in ("decisions.jsonl", "timeline.json"):
                shutil.copy(first / name, directory.staging / name)
            directory.finish(document)
