"""The search: TPE over all bounds, CMA-ES from the best of it, then scipy's bounded least squares as local polish."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from scipy.optimize import least_squares

from studies.calibrate.draft import Draft
from studies.calibrate.loss import Residuals, Trial, loss
from studies.calibrate.parameters import Point, values_at
from studies.calibrate.testbed import Testbed

SEED = 0
NEAR = 0.1
"""How far from the best of the first search the second one looks, as a share of the distance between bounds."""
POLISH_STEP = 0.03
"""Of the distance between bounds: the finite difference that still stands out of the noise of discrete events."""
LEAST_TRIALS = 4
"""One of them is TPE's."""
Say = Callable[[str], None]


def search(testbed: Testbed, draft: Draft, trials: int, say: Say) -> dict[str, float]:
    """The best values of ``trials``: a quarter by TPE over all bounds, the rest by CMA-ES around its best."""
    first = {parameter.name: parameter.start for parameter in testbed.parameters}
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=SEED, multivariate=True, n_startup_trials=len(first))
    best = _study(testbed, draft, sampler, trials // 4, first, say)
    sampler = optuna.samplers.CmaEsSampler(seed=SEED)
    return _study(testbed, draft, sampler, trials - trials // 4, best, say, around=NEAR)


def _study(
    testbed: Testbed, draft: Draft, sampler: optuna.samplers.BaseSampler, trials: int, first: dict[str, float], say: Say,
    around: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Parameters in unit coordinates, all of the cube or not further than ``around`` from ``first``, with whole ones as they are there.

    Trials that are worse than most after the same draws are cut short.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.PercentilePruner(40.0, n_startup_trials=10, n_warmup_steps=1)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    fixed = {item.name: first[item.name] for item in testbed.parameters if item.whole and around is not None}
    free = [item for item in testbed.parameters if item.name not in fixed]
    at = {item.name: item.to_unit(first[item.name]) for item in free}
    bounds = {name: (0.0, 1.0) if around is None else (max(0.0, x - around), min(1.0, x + around)) for name, x in at.items()}
    study.enqueue_trial(at)
    began = time.perf_counter()

    def objective(trial: optuna.Trial) -> float:
        values = {**fixed, **{item.name: item.from_unit(trial.suggest_float(item.name, *bounds[item.name])) for item in free}}

        def stop_if_hopeless(draws: int, so_far: float) -> None:
            trial.report(so_far, draws)
            if trial.should_prune():
                raise optuna.TrialPruned

        return loss(Trial(testbed, draft, values).residuals(testbed.search_seeds, stop_if_hopeless)[0])

    def tell(done: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number % 20 == 19:
            said = f"{type(sampler).__name__} {trial.number + 1}/{trials}: best loss {done.best_value:.3f}"
            say(f"{said}, {time.perf_counter() - began:.0f} s")

    study.optimize(objective, n_trials=trials, callbacks=[tell])
    return {**fixed, **{item.name: item.from_unit(study.best_params[item.name]) for item in free}}


def polish(testbed: Testbed, draft: Draft, values: dict[str, float], rounds: int, say: Say) -> dict[str, float]:
    """Bounded least squares from ``values`` over more draws, at most ``rounds`` gradients; kept only if it is better."""
    free = [parameter for parameter in testbed.parameters if not parameter.whole]

    def full(point: Point) -> dict[str, float]:
        return {**values, **values_at(free, point)}

    def residuals(point: Point) -> Residuals:
        return Trial(testbed, draft, full(point)).residuals(testbed.polish_seeds)[0]

    start = np.clip([parameter.to_unit(values[parameter.name]) for parameter in free], 0.001, 0.999)
    before = loss(residuals(start))
    settings: dict[str, Any] = {"method": "trf", "loss": "soft_l1", "diff_step": POLISH_STEP, "max_nfev": rounds, "x_scale": 0.3}
    found = least_squares(residuals, start, bounds=(np.zeros(len(free)), np.ones(len(free))), **settings)
    after = loss(residuals(found.x))
    say(f"polish: loss {before:.3f} → {after:.3f}")
    return full(found.x) if after < before else values
