"""A task and sweeps that take a few milliseconds a replay, for tests of studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.storages import InMemoryStorage

from talaria.sim import config
from talaria.sim.parallel import Pool
from talaria.sim.run import RunPlan, plan
from talaria.sim.scenario import Scenario
from talaria.tune import sweep
from talaria.tune.beats import Pulse
from talaria.tune.goals import parse_constraints, parse_objectives
from talaria.tune.search import Search
from talaria.tune.space import parse_space
from talaria.tune.sweep import Axis, Sweep
from talaria.tune.task import Task
from tests.sim.small import small_plan
from tests.small import SCENARIO


def small_task(
    space: str = "tau,linger", objective: str = "sct_p95_s", constraints: Sequence[str] = (), seeds: Sequence[int] = (0, 1), **changed: Any
) -> Task:
    scenario = Scenario.model_validate({**yaml.safe_load(SCENARIO), **changed})
    return Task(
        (scenario,), config.get("talaria"), parse_space(space), parse_objectives(objective), parse_constraints(constraints), tuple(seeds)
    )


def searched(
    task: Task, storage: Any, trials: int, *, name: str = "small", sampler: str = "tpe", seed: int = 0, jobs: int = 1,
    pulse: Pulse | None = None,
) -> Search:  # fmt: skip
    """A search that has run until its study had ``trials``."""
    search = Search(task, storage, name, trials, sampler=sampler, seed=seed, pulse=pulse or Pulse())
    with Pool(1000, jobs) as pool:
        search.run(pool, lambda finished: None)
    return search


def with_knobs(knobs: dict[str, object]) -> RunPlan:
    small = small_plan()
    return plan(small.scenario, small.config, knobs=knobs)


def swept(axes: list[Axis], seeds: int, storage: Any = None, out: Path | None = None, pulse: Pulse | None = None) -> tuple[Sweep, bool]:
    """A sweep that has run to its end, and whether it has."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    chosen = Sweep(axes, sweep.cases(axes, with_knobs, out), range(seeds), storage or InMemoryStorage(), None, pulse=pulse)
    with Pool(1000, 1) as pool:
        return chosen, chosen.run(pool, lambda: None)
