"""What the shared options ask for together, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from talaria.cli import policyfile
from talaria.cli.console import note
from talaria.cli.options import Options, check_files_wanted, parse_assignments, parse_knobs
from talaria.errors import InputError
from talaria.sim import config as configs
from talaria.sim import scenario as scenarios
from talaria.sim.config import Config
from talaria.sim.run import RunPlan, TraceOptions, plan
from talaria.sim.scenario import Scenario

DEFAULT_CONFIG = "talaria"


@dataclass(frozen=True, slots=True)
class Request:
    """``knobs`` are the command line's own, by name: a policy file's, then ``--set``'s over them."""

    scenario: Scenario
    config: Config
    knobs: Mapping[str, object]
    trace: TraceOptions | None

    def plan(self, *, config: Config | None = None, knobs: Mapping[str, object] | None = None) -> RunPlan:
        """The resolved run, under another config or with more knobs where a comparison or sweep asks for it. Raises InputError."""
        return plan(self.scenario, config or self.config, knobs={**self.knobs, **(knobs or {})}, trace=self.trace)


def request(options: Options, *, default_scenario: str) -> Request:
    """Raises InputError with the option, the value, what is allowed and the nearest valid name."""
    check_files_wanted(options.out, decisions=options.decisions, timeline=options.timeline)
    saved = policyfile.load(options.policy) if options.policy else policyfile.Policy()
    settings = parse_assignments(options.set or (), "--set", "KNOB=VALUE", "tau=2")
    name = default_scenario if options.scenario is None else options.scenario
    scenario = scenarios.load(name)
    parse_knobs(scenario.knobs, f"{name}: knobs")  # said with the file's name here, before the plan resolves them
    return Request(
        scenario=scenario,
        config=configs.get(saved.config or DEFAULT_CONFIG if options.config is None else options.config),
        knobs=saved.knobs | parse_knobs(settings, "--set"),
        trace=_trace_options(options),
    )


def announce(plan: RunPlan) -> None:
    """Say on stderr what is about to run and what was decided on the way there."""
    note(f"scenario {plan.scenario.name}: {plan.scenario.about}")
    for line in plan.notes:
        note(line)


def _trace_options(options: Options) -> TraceOptions | None:
    for given, option in ((options.map, "--map"), (options.arrivals, "--arrivals")):
        if given and options.trace is None:
            raise InputError("says how a trace is replayed, but there is none", where=option, fix="add --trace FILE")
    if options.trace is None:
        return None
    models = parse_assignments(options.map or (), "--map", "SRC=DST", "claude-opus=Qwen3-235B")
    return TraceOptions(path=str(options.trace), mapping=models, arrivals=options.arrivals)
