"""Places of a study. A trial holds one from the moment the storage gives out its number, and hands it on when it is run again.

A trial whose process ends before it goes back to the queue in three steps: it is marked, it is failed, and a successor with its
values is queued. Whoever dies between two of them leaves a running trial without a sign of life, or a failed one with a mark and
without a successor: anybody can finish either. That two do so at the same time makes two successors, of which the later gives way.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

BEAT, WORKER = "beat", "worker"
"""Trial attributes of whoever runs it: a counter that is raised as a sign of life, and host and process."""
RETURNED, DEATHS = "returned", "deaths"
"""Trial attributes: that its values go back to the queue, and how many processes have died with them by then; the same of a successor."""
MOST_DEATHS = 3
"""Values that take their process with them more often are left failed."""
ROOT, HISTORY = "failed_trial", "retry_history"
"""Optuna's trial attributes of a successor: the first trial with its values, and all of them."""

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def finished(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those of ``trials`` that count."""
    return [trial for trial in trials if trial.state in FINISHED]


def root(trial: FrozenTrial) -> int:
    """The number of the first trial with the same values: the place that it holds."""
    return int(trial.system_attrs.get(ROOT, trial.number))


def between(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that have given their values back, which nobody has queued again yet."""
    succeeded = {number for trial in trials for number in trial.system_attrs.get(HISTORY, ())}
    return [trial for trial in trials if trial.state == TrialState.FAIL and RETURNED in trial.user_attrs and trial.number not in succeeded]


def holding(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that hold their place: all but failed ones, and those in ``between``."""
    waiting = {trial.number for trial in between(trials)}
    return [trial for trial in trials if trial.state != TrialState.FAIL or trial.number in waiting]


def give_back(study: optuna.Study, trial: FrozenTrial, *, died: bool = False) -> bool:
    """Fail ``trial`` and queue its values again; False if somebody else has ended it.

    ``died``: the process that ran it has. Values that took more than ``MOST_DEATHS`` with them are not queued again.
    """
    deaths = trial.user_attrs.get(DEATHS, 0) + died
    if deaths <= MOST_DEATHS:
        try:
            study._storage.set_trial_user_attr(trial._trial_id, RETURNED, deaths)
        except UpdateFinishedTrialError:
            return False
    if not end(study, trial.number, state=TrialState.FAIL):
        return False
    if deaths <= MOST_DEATHS:
        _queue_again(study, trial, deaths)
    return True


def complete_returns(study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
    """Queue the values of those ``between``: whoever gave them back may have died."""
    for trial in between(trials):
        _queue_again(study, trial, trial.user_attrs[RETURNED])


def _queue_again(study: optuna.Study, trial: FrozenTrial, deaths: int) -> None:
    again = copy.deepcopy(trial)
    again.user_attrs = {name: value for name, value in again.user_attrs.items() if name not in (BEAT, WORKER, RETURNED)}
    if deaths:
        again.user_attrs[DEATHS] = deaths
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls it experimental
        RetryHeartbeatStaleTrialCallback()(study, again)


def end(study: optuna.Study, number: int, *, state: TrialState, values: list[float] | None = None) -> bool:
    """Tell the trial's end; False if somebody else has: its result is theirs."""
    try:
        study.tell(number, values, state=state)
    except UpdateFinishedTrialError:
        return False
    except ValueError as error:
        if "Cannot tell" not in str(error):
            raise
        return False
    return True
