"""A study in a storage: made or found by name, checked to be the same study, and its trials dealt out so that none is lost or double.

Any number of processes work on one study. Trials that must be run as they are (the first one, the points of a sweep) lie in the
storage's own queue. A process that has asked for a trial keeps it only if fewer than ``total`` places below its own are held: the storage
gives numbers out one by one, and a trial that is run again holds the place of the first one (see ``places``), so exactly ``total``
trials finish, whoever dies on the way.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from talaria.errors import InputError
from talaria.tune.places import WORKER, end, finished, holding, root

SCHEMA = "talaria.study/1"
KEY = "talaria"
"""The study attribute that says what is tuned."""
PLANNED = "planned"
"""The trial attribute that numbers the trials which are queued from the start."""
SAID = {"set": "knob values that are given", "seeds": "draws", "seed": "seed of the search"}
"""What a user calls parts of a study's identity."""
APPEARS_S = 10.0
"""How long another process may take between making a study and saying what it is."""


@dataclass(frozen=True, slots=True)
class Design:
    """``identity`` says what is tuned, as JSON; ``metrics`` names the objectives; ``planned``: parameters of the trials that are queued
    from the start."""

    name: str
    identity: Mapping[str, Any]
    metrics: Sequence[str]
    directions: Sequence[Literal["minimize", "maximize"]]
    distributions: Mapping[str, BaseDistribution]
    planned: Sequence[Mapping[str, Any]]


class Studied:
    """A study of ``total`` trials; see the module."""

    def __init__(self, design: Design, storage: BaseStorage, total: int, *, sampler: BaseSampler, pruner: BasePruner) -> None:
        self.design, self.total = design, total
        self._all_planned = len(design.planned) == total
        self.study = _open(design, storage, sampler, pruner)

    def trials(self) -> list[FrozenTrial]:
        """All trials, as they are now; they are not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def finished(self) -> list[FrozenTrial]:
        """The trials that count, by number."""
        return finished(self.trials())

    def ask(self) -> Trial | None:
        """The next trial for this process; None if there is none, perhaps for now."""
        trials = self.trials()
        waiting = self._queue_planned(trials) or any(trial.state == TrialState.WAITING for trial in trials)
        if not waiting and (self._all_planned or len(holding(trials)) >= self.total):
            return None
        trial = self.study.ask(dict(self.design.distributions))
        if self._is_surplus(trial):
            end(self.study, trial.number, state=TrialState.FAIL)
            return None
        try:
            trial.set_user_attr(WORKER, f"{socket.gethostname()}:{os.getpid()}")
        except UpdateFinishedTrialError:  # SQLite may give a queued trial to two processes; the other one was quicker
            return None
        return trial

    def _queue_planned(self, trials: Sequence[FrozenTrial]) -> bool:
        """Queue what is planned and not among ``trials``; whether there was anything."""
        queued = {trial.user_attrs.get(PLANNED) for trial in trials}
        missing = [number for number in range(len(self.design.planned)) if number not in queued]
        for number in missing:
            self.study.enqueue_trial(dict(self.design.planned[number]), user_attrs={PLANNED: number})
        return bool(missing)

    def _is_surplus(self, trial: Trial) -> bool:
        """One more than is wanted; or a planned trial, or one that is run again, which another process has queued too."""
        trials = self.trials()
        own = next(other for other in trials if other.number == trial.number)
        before = [other for other in holding(trials) if (root(other), other.number) < (root(own), own.number)]
        if any(root(other) == root(own) for other in before):
            return True
        planned = own.user_attrs.get(PLANNED)
        if planned is not None:
            return any(other.user_attrs.get(PLANNED) == planned for other in before)
        return self._all_planned or len({root(other) for other in before}) >= self.total


def _open(design: Design, storage: BaseStorage, sampler: BaseSampler, pruner: BasePruner) -> optuna.Study:
    known = {item.study_name: item.user_attrs for item in storage.get_all_studies()}
    identity = {"schema": SCHEMA, **design.identity}
    if design.name in known and KEY in known[design.name]:
        _check_same(design.name, known[design.name][KEY], identity)
    try:
        study = optuna.create_study(
            storage=storage, study_name=design.name, directions=list(design.directions), sampler=sampler, pruner=pruner
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental
            study.set_metric_names(list(design.metrics))
        study.set_user_attr(KEY, identity)
    except DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=design.name, sampler=sampler, pruner=pruner)
        _check_same(design.name, _said(study), identity)
    return study


def _said(study: optuna.Study) -> Any:
    """What the study is; its maker may be about to say it."""
    until_s = time.monotonic() + APPEARS_S
    while KEY not in study.user_attrs and time.monotonic() < until_s:
        time.sleep(0.05)
    return study.user_attrs.get(KEY)


def _check_same(name: str, found: Any, wanted: Mapping[str, Any]) -> None:
    """Raises InputError that names the first difference."""
    where, fix = f"study {name}", "give another --study NAME, or another --storage"
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        said = found.get("schema") if isinstance(found, dict) else None
        raise InputError(f"is no study of talaria's (schema {said!r})", where=where, allowed=SCHEMA, fix=fix)
    for key in wanted:
        if found.get(key) != wanted[key]:
            raise InputError(f"was begun with other {_difference(key, found.get(key), wanted[key])}", where=where, fix=fix)


def _difference(key: str, found: Any, wanted: Any) -> str:
    """``key`` and what differs in it, as far as it can be said in a line."""
    if key == "code":
        return "code of the simulator: results would not be comparable"
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [name for name in dict.fromkeys([*found, *wanted]) if found.get(name) != wanted.get(name)]
        changed = [name for name in names if name in found and name in wanted]
        if changed and key in ("scenarios", "profiles"):
            return f"{key}: {', '.join(changed)} has changed since"
        found, wanted = ({name: side.get(name) for name in names} for side in (found, wanted))
    return f"{SAID.get(key, key)}: {_shown(found)}, now {_shown(wanted)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        text = ", ".join(map(str, value))
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {_shown(of)}" for name, of in value.items())
    else:
        text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
