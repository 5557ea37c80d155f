"""Samplers by name, seeded per trial: what a trial tries follows from seed, number and history, whoever asks, before or after a resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

TPE, CMAES, NSGA2 = "tpe", "cmaes", "nsga2"


def _cmaes(seed: int) -> BaseSampler:
    return CmaEsSampler(seed=seed)


def _nsga2(seed: int) -> BaseSampler:
    return NSGAIISampler(seed=seed, population_size=20)


def _tpe(seed: int) -> BaseSampler:
    return TPESampler(seed=seed)


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {TPE: _tpe, CMAES: _cmaes, NSGA2: _nsga2}


class PerTrial(BaseSampler):
    """A fresh sampler for every trial, seeded with ``seed`` and the trial's number."""

    def __init__(self, name: str, seed: int) -> None:
        self._make, self._seed = SAMPLERS[name], seed
        self._inner = self._make(seed)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._inner = self._make((self._seed * 1_000_003 + trial.number) % 2**31)
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._inner.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return self._inner.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._inner.after_trial(study, trial, state, values)


class Planned(BaseSampler):
    """For studies all of whose trials are queued from the start: there is nothing to sample."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        return self._params[param_name]
