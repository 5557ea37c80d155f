"""Places of trials: a process that dies at any step of giving trials back loses none, and none is run twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

from talaria.sim import batch
from talaria.sim.run import simulate
from talaria.tune import beats, places, search, sweep
from talaria.tune.beats import Beats, Pulse
from talaria.tune.places import DEATHS, FINISHED, MOST_DEATHS, RETURNED, between, complete_returns, finished, give_back, holding
from talaria.tune.storage import opened
from talaria.tune.sweep import Axis
from talaria.tune.task import Measured, Replay, measure
from tests.tune.small import searched, small_task, swept

TRIALS = 8
AT_ONCE = Pulse(every_s=1000.0, grace_s=0.0)
"""Whoever's trial gives no sign of life between two looks is dead; nobody else is alive here."""

STEPS = ["before anything", "after the mark", "after the failure", "after the successor"]


class Died(BaseException):
    """Stands for the end of the process: nothing runs after it."""


@pytest.fixture(params=["sqlite:///study.db", "journal:study.log"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BaseStorage]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    with opened(request.param) as kept:
        yield kept


def died(*_: object, **__: object) -> Any:
    raise Died


def die_giving_back(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The first trial that this process gives back, its own or another's, is its last deed: so far it gets."""
    queue_again = places._queue_again

    def last_deed(*arguments: Any) -> None:
        queue_again(*arguments)
        raise Died

    if step == STEPS[0]:
        monkeypatch.setattr(search, "give_back", died)
        monkeypatch.setattr(beats, "give_back", died)
    elif step == STEPS[1]:
        monkeypatch.setattr(places, "end", died)
    else:
        monkeypatch.setattr(places, "_queue_again", died if step == STEPS[2] else last_deed)


def die_in_replay(monkeypatch: pytest.MonkeyPatch, number: int, how: type[BaseException]) -> None:
    """The ``number``-th replay ends with ``how``."""
    calls = iter(range(1, 10_000))

    def mortal(replay: Replay) -> Measured:
        if next(calls) == number:
            raise how
        return measure(replay)

    monkeypatch.setattr(search, "measure", mortal)


def check_nothing_lost(storage: BaseStorage) -> None:
    """The study completes with the values that it has when nobody dies, each once."""
    trials = searched(small_task(), storage, TRIALS, pulse=AT_ONCE).studied.trials()
    whole = searched(small_task(), InMemoryStorage(), TRIALS).studied.finished()
    assert sorted(str(trial.params) for trial in finished(trials)) == sorted(str(trial.params) for trial in whole)
    assert {trial.state for trial in trials} == {TrialState.COMPLETE, TrialState.FAIL}


IN_BATCH_TWO = 13
"""Four trials of two draws have ended, the next four have had one."""


@pytest.mark.parametrize("step", STEPS)
def test_whoever_is_interrupted_and_dies_giving_back_loses_nothing(
    step: str, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(Died):
        die_in_replay(patched, IN_BATCH_TWO, KeyboardInterrupt)
        die_giving_back(patched, step)
        searched(small_task(), storage, TRIALS)
    check_nothing_lost(storage)


@pytest.mark.parametrize("step", STEPS)
def test_whoever_dies_saving_the_trials_of_a_dead_one_loses_nothing(
    step: str, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(Died):
        die_in_replay(patched, IN_BATCH_TWO, Died)
        die_giving_back(patched, STEPS[0])
        searched(small_task(), storage, TRIALS)
    with monkeypatch.context() as patched, pytest.raises(Died):
        die_giving_back(patched, step)
        searched(small_task(), storage, TRIALS, pulse=AT_ONCE)
    check_nothing_lost(storage)


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_sweep_whose_process_dies_giving_back_ends_with_every_point(
    step: str, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = [Axis("tau", (0.0, 0.5, 1.0, 2.0, 5.0))]
    alone, _ = swept(axes, 1)
    calls = iter(range(1, 10))

    def mortal(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return simulate(*arguments, **keywords)

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(batch, "simulate", mortal)
        die_giving_back(patched, step)
        swept(axes, 1, storage)
    shared, whole = swept(axes, 1, storage, pulse=AT_ONCE)
    assert whole and shared.points() == alone.points()


def test_two_that_end_a_return_at_once_run_it_once(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(Died):
        die_in_replay(patched, IN_BATCH_TWO, KeyboardInterrupt)
        die_giving_back(patched, STEPS[2])
        searched(small_task(), storage, TRIALS)
    study = optuna.load_study(study_name="small", storage=storage)
    seen = study.get_trials()
    assert len(between(seen)) == 1
    for _ in range(2):  # both have read the study before the other had written
        complete_returns(study, seen)
    assert [trial.state for trial in study.get_trials()].count(TrialState.WAITING) == 2
    check_nothing_lost(storage)


def running_study() -> tuple[optuna.Study, Callable[[], int]]:
    """A study, and how many of its trials hold a place."""
    study = optuna.create_study(storage=InMemoryStorage())
    study.ask().suggest_float("x", 0, 1)
    return study, lambda: len(holding(study.get_trials()))


@pytest.mark.parametrize("step", STEPS)
def test_a_trial_holds_its_place_at_every_step(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study, held = running_study()
    die_giving_back(monkeypatch, step)
    with pytest.raises(Died):
        (beats if step == STEPS[0] else places).give_back(study, study.get_trials()[0])
    assert held() == 1


def test_two_that_see_a_trial_die_queue_it_once() -> None:
    study, _ = running_study()
    (seen,) = study.get_trials()
    assert give_back(study, seen) and not give_back(study, seen)
    assert len(study.trials) == 2


def test_what_is_given_back_is_not_changed_where_it_was_read() -> None:
    study, _ = running_study()
    (seen,) = study.get_trials(deepcopy=False)
    before = seen.user_attrs | seen.system_attrs
    give_back(study, seen, died=True)
    assert seen.user_attrs | seen.system_attrs | {RETURNED: 1} == before | {RETURNED: 1}


def test_values_that_take_every_process_with_them_are_left_failed_and_interrupts_do_not_count() -> None:
    study, held = running_study()
    for deaths in range(MOST_DEATHS + 1):
        assert held() == 1
        for died in (False, True):
            (last,) = (trial for trial in study.get_trials() if trial.state == TrialState.RUNNING)
            assert last.user_attrs.get(DEATHS, 0) == deaths
            give_back(study, last, died=died)
            if held():
                study.ask()
    assert held() == 0 and not any(trial.state in FINISHED for trial in study.get_trials())
    complete_returns(study, study.get_trials())
    assert held() == 0


def test_a_look_at_the_trials_ends_what_another_began(monkeypatch: pytest.MonkeyPatch) -> None:
    study, held = running_study()
    with monkeypatch.context() as patched, pytest.raises(Died):
        die_giving_back(patched, STEPS[2])
        give_back(study, study.get_trials()[0])
    Beats(study, Pulse()).retry_dead(study.get_trials())
    assert held() == 1 and [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]
