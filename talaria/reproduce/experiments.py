"""The runs behind a reproduction: which scenarios under which configurations, as jobs by seed, and what they found."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from talaria.policy.knobs import BY_NAME
from talaria.profiles import load as load_profile
from talaria.report.document import Host
from talaria.report.measured import Array
from talaria.report.metrics import GIB
from talaria.report.record import RunRecord
from talaria.report.statistics import Estimate, estimate, sct_by_session, sessions_improved
from talaria.reproduce.measures import Draw, Values, of_components, of_draw, of_run
from talaria.reproduce.targets import ComponentSource, CurveSource, DrawSource, RunSource, SettingSource, Source
from talaria.sim import components
from talaria.sim import config as configs
from talaria.sim import scenario as scenarios
from talaria.sim.compare import MECHANISMS
from talaria.sim.components import simulate_components
from talaria.sim.interrupts import deferred
from talaria.sim.parallel import ordered_map
from talaria.sim.run import RunPlan, beyond_evidence, plan, simulate
from talaria.workload.open import open_workload

REPLAY = "paper-tp8"
TAU_SWEEP = "paper-tp4-tau"
LOADS = ("low", "medium", "high")
ROUTERS = ("least-pressure", "session-sticky", "full")
TAUS: tuple[float, ...] = BY_NAME["tau"].sweep
CORPUS = "corpus"
DRAWN = (CORPUS, REPLAY, "paper-tp4-high")
"""Workloads whose draws are measured by themselves: a preset, and those of scenarios."""
COMPONENTS = "switch components"
"""The switch component run."""

TIB = 2**40

SETTINGS: dict[str, Callable[[RunPlan], Any]] = {
    "gap_cap_s": lambda planned: planned.scenario.gap_cap_s,
    "gpu_gib": lambda planned: planned.instances[0].profile.hardware.hbm_bytes / GIB,
    "gpus": lambda planned: planned.instances[0].profile.hardware.tp,
    "host_tib": lambda planned: sum(_host_bytes(planned)) / TIB,
    "models": lambda planned: list(planned.scenario.models),
    "t_ttft_s": lambda planned: planned.knobs.t_ttft_s,
    "workers": lambda planned: len(planned.instances),
    "taus_s": lambda planned: list(TAUS),
}
"""Inputs that the source states, as ours has them."""


def _host_bytes(planned: RunPlan) -> tuple[int, int]:
    """Host memory of one server that a scenario uses: weight images and KV."""
    hardware = planned.instances[0].profile.hardware
    return hardware.host_weight_bytes, hardware.host_kv_bytes


class Experiment(NamedTuple):
    """One line of an experiment: a scenario under a configuration, the lease timeout at ``tau`` where it is swept."""

    scenario: str
    config: str
    tau: float | None = None

    def plan(self) -> RunPlan:
        knobs = None if self.tau is None else {"tau": self.tau}
        return plan(scenarios.load(self.scenario), configs.get(self.config), knobs=knobs)


EXPERIMENTS = (
    *(Experiment(REPLAY, config) for config in MECHANISMS),
    *(Experiment(f"paper-tp4-{load}", router) for load in LOADS for router in ROUTERS),
    *(Experiment(TAU_SWEEP, "talaria", tau) for tau in TAUS),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One experiment, draw or component run under one seed; only an experiment has a ``plan``. ``keep``: also what the figures need."""

    key: Experiment | str
    seed: int
    plan: RunPlan | None
    workload: Mapping[str, Any]
    keep: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    values: Values
    sct_s: Array | None
    kept: RunRecord | Draw | None
    cpu_s: float
    warnings: list[str]


def run_job(job: Job) -> Outcome:
    """Simulate or draw, and reduce it to what is kept."""
    started_s = time.process_time()
    if job.key == COMPONENTS:
        values = of_components(simulate_components(components.load(), job.seed))
        return Outcome(job, values, None, None, time.process_time() - started_s, [])
    if job.plan is None:
        values, draw = of_draw(open_workload(job.workload, job.seed))
        return Outcome(job, values, None, draw if job.keep else None, time.process_time() - started_s, [])
    record = simulate(job.plan, job.seed, keep_names=job.keep)
    cpu_s = time.process_time() - started_s
    return Outcome(job, of_run(record), sct_by_session(record), record if job.keep else None, cpu_s, beyond_evidence(job.plan, record))


@dataclass(slots=True)
class Findings:
    """What the finished seeds gave, by experiment or draw; lists are parallel to ``seeds``."""

    plans: Mapping[Experiment, RunPlan]
    seeds: list[int]
    values: dict[Experiment | str, list[Values]] = field(default_factory=dict)
    scts_s: dict[Experiment, list[Array]] = field(default_factory=dict)
    records: dict[Experiment, list[RunRecord]] = field(default_factory=dict)
    draws: dict[str, list[Draw]] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)
    """What the first seed warns of, each sentence once."""

    def estimate(self, key: Experiment | str, name: str) -> Estimate:
        """Mean and spread over seeds of one measure."""
        return estimate([values[name] for values in self.values[key]])

    def column(self, key: Experiment, name: str) -> list[float]:
        """Its values, seed by seed; NaN where it is undefined."""
        return [float("nan") if (value := values[name]) is None else value for values in self.values[key]]

    def mean(self, key: Experiment | str, name: str) -> float:
        """Its mean; NaN where no seed has one."""
        found = self.estimate(key, name).mean
        return float("nan") if found is None else found

    def improved(self, a: Experiment, b: Experiment) -> Estimate:
        """Sessions that end sooner under ``a`` than under ``b``."""
        pairs = zip(self.scts_s[a], self.scts_s[b], strict=True)
        return estimate([float(sessions_improved(left, right)) for left, right in pairs])

    def predict(self, source: Source) -> tuple[Any, Estimate | None, int]:
        """What ``source`` gives: a plain value or an estimate, and the seeds in which it is defined."""
        if isinstance(source, SettingSource):
            planned = next(found for key, found in self.plans.items() if key.scenario == source.scenario)
            return SETTINGS[source.setting](planned), None, len(self.seeds)
        if isinstance(source, CurveSource):
            return load_profile(source.profile).timing(source.model).prefill_s(0, 0, source.lost_tokens), None, len(self.seeds)
        key, name = _measured_by(source)
        if isinstance(source, RunSource) and source.versus is not None:
            return None, self.improved(experiment(source), Experiment(source.run, source.versus)), len(self.seeds)
        defined = sum(values[name] is not None for values in self.values[key])
        return None, self.estimate(key, name), defined


def _measured_by(source: RunSource | ComponentSource | DrawSource) -> tuple[Experiment | str, str]:
    """The key of the runs that have it, and the measure's name."""
    if isinstance(source, ComponentSource):
        return COMPONENTS, source.measure
    return (source.workload, source.statistic) if isinstance(source, DrawSource) else (experiment(source), source.metric)


def experiment(source: RunSource) -> Experiment:
    return Experiment(source.run, source.config, source.tau)


class Campaign:
    """All experiments under ``seeds``, seed by seed: an interrupted campaign has whole seeds. ``keep``: also what the figures need."""

    def __init__(self, seeds: Sequence[int], *, keep: bool) -> None:
        self._plans = {key: key.plan() for key in EXPERIMENTS}
        self._keys: tuple[Experiment | str, ...] = (*EXPERIMENTS, *DRAWN, COMPONENTS)
        self._seeds = seeds
        self._outcomes: list[Outcome] = []
        self._started_s = time.perf_counter()
        self.jobs = [self._job(key, seed, keep) for seed in seeds for key in self._keys]

    def _job(self, key: Experiment | str, seed: int, keep: bool) -> Job:
        if isinstance(key, Experiment):
            return Job(key, seed, self._plans[key], {}, keep)
        workload = {} if key == COMPONENTS else {"preset": key} if key == CORPUS else scenarios.load(key).workload
        return Job(key, seed, None, workload, keep and key == CORPUS)

    def run(self) -> Generator[None, None, None]:
        """Run the jobs, yielding after each. Closing the generator ends them; what is finished stays."""
        with closing(ordered_map(run_job, self.jobs)) as outcomes:
            for outcome in outcomes:
                with deferred():
                    self._outcomes.append(outcome)
                yield

    @property
    def finished_seeds(self) -> int:
        return len(self._outcomes) // len(self._keys)

    @property
    def seeds_asked(self) -> int:
        return len(self._seeds)

    def host(self, peak_rss_mib: float) -> Host:
        """What it cost so far: ``sim_cpu_s`` is of all experiments and draws of one seed."""
        cpu_s = sum(outcome.cpu_s for outcome in self._outcomes)
        return Host(cpu_s / max(self.finished_seeds, 1), time.perf_counter() - self._started_s, peak_rss_mib)

    def findings(self) -> Findings:
        """What the seeds that are complete gave."""
        finished = self.finished_seeds
        found = Findings(self._plans, list(self._seeds[:finished]))
        for outcome in self._outcomes[: finished * len(self._keys)]:
            key = outcome.job.key
            found.values.setdefault(key, []).append(outcome.values)
            if outcome.job.seed == self._seeds[0]:
                found.warnings.update(dict.fromkeys(outcome.warnings))
            if isinstance(outcome.kept, Draw) and isinstance(key, str):
                found.draws.setdefault(key, []).append(outcome.kept)
            if isinstance(key, Experiment) and outcome.sct_s is not None:
                found.scts_s.setdefault(key, []).append(outcome.sct_s)
                if isinstance(outcome.kept, RunRecord):
                    found.records.setdefault(key, []).append(outcome.kept)
        return found
