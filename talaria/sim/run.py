"""From a scenario, a configuration and knobs to simulated runs: resolved once into a plan, then one record per seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from talaria.errors import InputError, unknown_name
from talaria.policy.knobs import Knobs, with_values
from talaria.policy.rounds import protected_steps
from talaria.policy.router import ROUTERS, LeaseCounts, Router
from talaria.policy.snapshot import Capabilities
from talaria.profiles import Profile
from talaria.profiles import load as load_profile
from talaria.report.conservation import ConservationError
from talaria.report.declog import DecisionLog
from talaria.report.record import RunRecord, hbm_columns, phase_columns
from talaria.report.recording import RecordingRouter
from talaria.sim.cluster import Cluster
from talaria.sim.config import Config
from talaria.sim.host import Ground
from talaria.sim.instance import SimInstance
from talaria.sim.kernel import Kernel
from talaria.sim.memory import InstanceMemory, layouts
from talaria.sim.noise import Factors, factors
from talaria.sim.prefixes import PromptBook
from talaria.sim.scenario import InstanceGroup, Scenario
from talaria.sim.variation import SwitchVariation
from talaria.substrate.layout import LayoutError
from talaria.substrate.prefix import PrefixForest
from talaria.workload.arrivals import parse as parse_arrivals
from talaria.workload.open import open_workload
from talaria.workload.session import Workload
from talaria.workload.streams import stream
from talaria.workload.transform import assign_models, map_models


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """A trace in place of the scenario's workload. ``arrivals`` defaults to the trace's own times, where it has them."""

    path: str
    mapping: Mapping[str, str] = field(default_factory=dict)
    arrivals: str | None = None


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance, resolved: what it can, runs, and has open at the start."""

    name: str
    profile: Profile
    capabilities: Capabilities
    models: tuple[str, ...]
    opened: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that determines a run but its seed. ``notes`` are said to the user once."""

    scenario: Scenario
    config: Config
    knobs: Knobs
    instances: tuple[InstancePlan, ...]
    workload: Mapping[str, Any]
    mapping: Mapping[str, str]
    arrivals: str
    notes: list[str]
    macro: bool = True
    """Decode in macro-steps; else step by step, which is the tests' oracle."""


def plan(
    scenario: Scenario, config: Config, *, knobs: Mapping[str, object] | None = None, trace: TraceOptions | None = None
) -> RunPlan:
    """Resolve a run. Knobs: defaults, then the scenario's, the configuration's, and ``knobs``.

    Raises InputError (unknown model, impossible memory, bad trace) and KnobError.
    """
    if config.router not in ROUTERS:
        raise unknown_name("router", config.router, ROUTERS, where=f"config {config.name}")
    resolved = with_values(Knobs(), {**scenario.knobs, **config.knobs, **(knobs or {})})
    instances = _instances(scenario, config)
    _check_targets(resolved, instances)
    source: Mapping[str, Any] = {"trace": trace.path} if trace is not None else scenario.workload
    arrivals = scenario.arrivals
    notes: list[str] = []
    workload = open_workload(source, 0, where=f"scenario {scenario.name}: workload")
    if trace is not None:
        arrivals = trace.arrivals if trace.arrivals is not None else "trace" if _has_times(workload) else scenario.arrivals
        if trace.arrivals is None and arrivals != "trace":
            notes.append(f"{trace.path} has no times: sessions arrive as {arrivals}")
    mapping = assign_models(workload, scenario.models, dict(trace.mapping) if trace is not None else None)
    if trace is not None:
        notes.append("models: " + ", ".join(f"{given} -> {served}" for given, served in mapping.items()))
    _check_homes(mapping, instances, scenario)
    asked = trace is not None and trace.arrivals is not None
    parse_arrivals(arrivals, where="--arrivals" if asked else f"scenario {scenario.name}: arrivals")
    if trace is not None and scenario.gap_cap_s is not None:
        notes.append(f"gaps are capped at {scenario.gap_cap_s:g} s, as scenario {scenario.name} says")
    return RunPlan(scenario, config, resolved, instances, source, mapping, arrivals, notes)


def _check_targets(knobs: Knobs, instances: tuple[InstancePlan, ...]) -> None:
    """Targets that a model misses even alone and with every switch at its best are an input error (Eq. 4, 5)."""
    for item in instances:
        timing = {name: item.profile.timing(name) for name in item.models}
        slowest = max(item.models, key=lambda name: timing[name].step_s(1, 0))
        step_s = timing[slowest].step_s(1, 0)
        if knobs.t_tpot_s <= step_s:
            raise InputError(
                f"infeasible target t_tpot={knobs.t_tpot_s:g} s", where=f"profile {item.profile.name}, model {slowest}",
                allowed=f"above its decode step of {step_s:.3g} s", fix="raise it with --set t_tpot=...",
            )  # fmt: skip
        if item.capabilities.hot or len(item.models) == 1:
            continue
        bound_s = knobs.gamma * knobs.t_ttft_s
        steps = protected_steps(bound_s, knobs.t_tpot_s)
        needed_s = sum(steps * timing[name].step_s(1, 0) + timing[name].d2d_switch_s for name in item.models)
        if needed_s > bound_s:
            raise InputError(
                f"infeasible target gamma*t_ttft={bound_s:g} s", where=f"profile {item.profile.name}, {len(item.models)} models",
                allowed=f"at least {needed_s:.3g} s: protected decode and fully staged switches of all its models",
                fix="raise t_ttft, gamma or t_tpot",
            )  # fmt: skip


def _check_homes(mapping: Mapping[str, str], instances: tuple[InstancePlan, ...], scenario: Scenario) -> None:
    """Every model of the workload has an instance that may run it. Raises InputError."""
    runnable = {name for item in instances for name in item.models}
    for name in mapping.values():
        if name not in runnable:
            raise InputError(
                f"no instance runs model {name!r}", where=f"scenario {scenario.name}: instances", allowed=", ".join(sorted(runnable)),
                fix="add an instance for it, or map its calls to another model",
            )  # fmt: skip


def _has_times(workload: Workload) -> bool:
    first = next(iter(workload.sessions()), None)
    return first is not None and first.start_s is not None


def _instances(scenario: Scenario, config: Config) -> tuple[InstancePlan, ...]:
    plans: list[InstancePlan] = []
    for group in scenario.instances:
        profile = load_profile(group.profile or scenario.profile, where=f"scenario {scenario.name}: profile")
        models = group.models or scenario.models
        if group.pool == "hot":
            models = models[:1]
        for name in models:
            profile.model(name)
        limit = min(group.max_resident_models, _most_resident(scenario, profile, models))
        for _ in range(group.count):
            opened = group.opened if group.opened is not None else _rotated(models, len(plans))[:limit]
            capabilities = _capabilities(group, config, limit)
            plans.append(InstancePlan(f"{group.pool}-{len(plans)}", profile, capabilities, models, opened[:limit]))
    return tuple(plans)


def _rotated(models: tuple[str, ...], by: int) -> tuple[str, ...]:
    by %= len(models)
    return models[by:] + models[:by]


def _most_resident(scenario: Scenario, profile: Profile, models: tuple[str, ...]) -> int:
    """Models that fit one GPU with their residue, and the host with their images; each must fit alone, with its residue."""
    try:
        layout, needs = layouts(profile, models)
        for need in needs.values():
            layout.regions(need)
            layout.peak_bytes([need])
    except LayoutError as error:
        raise InputError(str(error), where=f"scenario {scenario.name}, profile {profile.name}", fix="use a larger GPU group") from None
    hardware = profile.hardware
    room = hardware.device_cap_bytes - hardware.bump_bytes
    by_device = len(models) if hardware.residue_bytes == 0 else room // hardware.residue_bytes
    images = accumulate(sorted((profile.model(name).total_weight_bytes for name in models), reverse=True))
    by_host = sum(1 for held in images if held <= hardware.host_weight_bytes)
    return int(max(1, min(by_device, by_host)))


def _capabilities(group: InstanceGroup, config: Config, limit: int) -> Capabilities:
    hot = group.pool == "hot"
    return Capabilities(
        hot=hot, session_prefill=config.session_prefill, hkvr=config.hkvr and group.hkvr,
        staging=config.staging and group.staging and not hot, inflight_kv=group.inflight_kv, max_running=group.max_running,
        max_resident_models=limit,
    )  # fmt: skip


def simulate(
    plan: RunPlan, seed: int, *, log: DecisionLog | None = None, timeline: bool = False, keep_names: bool = False
) -> RunRecord:
    """One run. The same plan and seed give the same record, whatever the process.

    Raises ConservationError if a sum that must hold does not.
    """
    scenario = plan.scenario
    workload = map_models(open_workload(plan.workload, seed), plan.mapping)
    arrivals = parse_arrivals(plan.arrivals)
    record = RunRecord(scenario.name, plan.config.name, seed, scenario.models, tuple(item.name for item in plan.instances))
    if timeline:
        record.phases = phase_columns()
    if timeline or keep_names:
        record.hbm_samples = hbm_columns()
        record.session_names = []
    env, forest = Kernel(), PrefixForest()
    arguments = _router_arguments(plan)
    router = ROUTERS[plan.config.router](**arguments)
    asked: Router | RecordingRouter = router
    if log is not None:
        _log_header(plan, seed, log, arguments)
        asked = RecordingRouter(router, log, lambda: env.now)
    cluster = Cluster(
        env, asked, record, PromptBook(forest, workload.block_tokens, workload.block_scope), pool=arrivals.pool,
        gap_cap_s=scenario.gap_cap_s, telemetry=scenario.telemetry, warmup_s=scenario.warmup_s,
    )  # fmt: skip
    instances = [_build(plan, index, seed, env, forest, cluster, log) for index in range(len(plan.instances))]
    cluster.run(instances, arrivals.schedule(workload.sessions(), stream(seed, "arrivals")))
    _close_books(record, router.lease_counts, instances)
    return record


def _router_arguments(plan: RunPlan) -> dict[str, Any]:
    return {
        "instances": {item.name: item.capabilities for item in plan.instances},
        "knobs": plan.knobs,
        "output_tokens": {name: item.profile.model(name).output_tokens_prior for item in plan.instances for name in item.models},
    }


def _log_header(plan: RunPlan, seed: int, log: DecisionLog, router_arguments: dict[str, Any]) -> None:
    log.header(
        scenario=plan.scenario.name, config=plan.config.name, seed=seed, router=plan.config.router, router_arguments=router_arguments,
        slots_arguments={item.name: {"knobs": plan.knobs} for item in plan.instances},
    )  # fmt: skip


def _build(
    plan: RunPlan, index: int, seed: int, env: Kernel, forest: PrefixForest, cluster: Cluster, log: DecisionLog | None
) -> SimInstance:
    item, scenario = plan.instances[index], plan.scenario
    hardware = item.profile.hardware
    timing = {name: item.profile.timing(name) for name in item.models}
    if scenario.open_s is not None:
        timing = {name: replace(truth, open_s=scenario.open_s) for name, truth in timing.items()}
    error = scenario.belief_error
    beliefs = {
        name: truth.scaled(prefill=error.prefill, decode=error.decode, restore=error.restore, switch=error.switch)
        for name, truth in timing.items()
    }

    def streams(purpose: str) -> np.random.Generator:
        return stream(seed, f"{purpose} of instance {index}")

    def variation(purpose: str, cv: float) -> Factors:
        return factors(streams(purpose), cv if scenario.noise else 0.0)

    ground = Ground(
        timing, variation("prefill", hardware.prefill_cv), variation("decode", hardware.decode_cv),
        SwitchVariation(hardware, streams, vary=scenario.noise), plan.macro, hardware.call_overhead_s,
    )  # fmt: skip
    capabilities = item.capabilities
    memory = InstanceMemory(item.profile, item.models, forest, hkvr=capabilities.hkvr, swap=capabilities.inflight_kv == "swap")
    instance = SimInstance(
        env, index, item.name, capabilities, item.models, ground, memory, beliefs, plan.knobs, truth=cluster.truth, host=cluster,
        log=None if log is None else log.slots, watched=cluster.watches_phases,
    )  # fmt: skip
    instance.open_at_start(item.opened)
    return instance


def _close_books(record: RunRecord, counts: LeaseCounts, instances: list[SimInstance]) -> None:
    record.leases_granted, record.leases_used = counts.granted, counts.used
    record.leases_unused = counts.granted - counts.used - counts.returned  # for one that is still live no call is left to come
    for instance in instances:
        memory = instance.memory
        wrong = memory.audit()
        if wrong:
            raise ConservationError(f"{instance.id}: {'; '.join(wrong)}")
        record.peak_hbm_bytes = max(record.peak_hbm_bytes, memory.peak_bytes)
        record.host_capacity_misses += memory.host_capacity_misses
        for family, skips in memory.restore_skips.items():
            record.restore_skips[family] = record.restore_skips.get(family, 0) + skips
        for model, batch in instance.largest_batch.items():
            record.largest_batch[model] = max(record.largest_batch.get(model, 0), batch)


def beyond_evidence(plan: RunPlan, record: RunRecord) -> list[str]:
    """Where the run's prompts and decode batches left the range of the points that its profiles were fitted to, a line a profile."""
    prompts, models = record.calls["prompt_tokens"], record.calls["model"]
    said: dict[str, dict[str, None]] = {}
    for code, name in enumerate(record.models):
        of_model = prompts[models == code]
        for profile in (item.profile for item in plan.instances if name in item.models and of_model.size):
            phrases = profile.beyond_evidence(name, prompt_tokens=int(of_model.max()), batch=record.largest_batch.get(name, 0))
            said.setdefault(profile.name, {}).update(dict.fromkeys(phrases))
    return [f"profile {name} is extrapolated: {'; '.join(phrases)}" for name, phrases in said.items() if phrases]
