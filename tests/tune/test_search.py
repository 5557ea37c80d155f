"""The search: the first trial, what it depends on and what not, early stops, constraints, interrupts and resumes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from talaria.errors import InputError
from talaria.sim import parallel
from talaria.sim.parallel import Pool
from talaria.tune import search as searching
from talaria.tune.beats import Beats, Pulse
from talaria.tune.goals import parse_objectives
from talaria.tune.places import BEAT, FINISHED, MOST_DEATHS, WORKER, give_back
from talaria.tune.search import DRAWS, REFUSED, Search
from talaria.tune.task import Measured, Replay, Task, measure
from tests.tune.small import searched, small_task


@pytest.fixture
def storage() -> BaseStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return InMemoryStorage()


def told(search: Search) -> list[tuple[Any, ...]]:
    """What a study says, without times and processes."""
    return [(trial.number, trial.state, trial.params, trial.values, trial.intermediate_values) for trial in search.studied.trials()]


def test_the_first_trial_is_the_defaults_on_the_same_draws_as_every_other(storage: BaseStorage) -> None:
    task = small_task()
    first, *others = searched(task, storage, 6).studied.finished()
    assert first.params == {"tau": 1.0, "linger": 1.5} and first.number == 0
    expected = [[measure(task.replay(task.scenarios[0], first.params, seed)).values] for seed in task.seeds]
    assert first.user_attrs[DRAWS] == expected and len(others) == 5


@pytest.fixture
def workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WORTH_WORKERS_S", -1.0)


@pytest.mark.usefixtures("workers_at_once")
def test_the_number_of_jobs_changes_nothing(storage: BaseStorage) -> None:
    one, two = searched(small_task(), storage, 14, name="one", jobs=1), searched(small_task(), storage, 14, name="two", jobs=2)
    assert told(one) == told(two)


def test_another_seed_searches_elsewhere(storage: BaseStorage) -> None:
    one, two = (searched(small_task(), storage, 5, name=str(seed), seed=seed) for seed in (1, 2))
    assert told(one)[0] == told(two)[0] and told(one)[1:] != told(two)[1:]


def test_a_resumed_study_goes_on_as_if_it_had_not_stopped(storage: BaseStorage) -> None:
    whole = searched(small_task(), storage, 16, name="whole")
    searched(small_task(), storage, 8, name="parts")
    assert told(searched(small_task(), storage, 16, name="parts")) == told(whole)


def test_a_finished_study_runs_nothing_more(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    searched(small_task(), storage, 5)
    monkeypatch.setattr(searching, "measure", None)
    assert len(searched(small_task(), storage, 4).studied.finished()) == 5


def test_losers_are_stopped_by_the_draws_they_have_seen(storage: BaseStorage) -> None:
    trials = searched(small_task(seeds=range(3)), storage, 30).studied.finished()
    stopped = [trial for trial in trials if trial.state == TrialState.PRUNED]
    assert stopped and all(len(trial.user_attrs[DRAWS]) == len(trial.intermediate_values) < 3 for trial in stopped)
    best = min(trial.values[0] for trial in trials if trial.state == TrialState.COMPLETE)
    assert min(trial.values[0] for trial in stopped) > best


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_search_finds_better_values_than_the_defaults_on_its_draws(sampler: str, storage: BaseStorage) -> None:
    trials = searched(small_task("tau,gamma,t_ttft"), storage, 20, sampler=sampler).studied.finished()
    complete = [trial.values[0] for trial in trials if trial.state == TrialState.COMPLETE]
    assert min(complete) < complete[0]


def test_several_objectives_give_a_value_each_and_no_early_stop(storage: BaseStorage) -> None:
    trials = searched(small_task("tau,instances=1:3", "sct_p95_s,cost"), storage, 8, sampler="nsga2").studied.finished()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 8
    assert all(trial.values[1] == trial.params["instances"] for trial in trials)


def test_knobs_that_cannot_be_run_together_are_a_trial_that_is_passed_over(storage: BaseStorage) -> None:
    trials = searched(small_task("gamma=0.05:1,t_ttft=0.5:10"), storage, 12).studied.finished()
    refused = [trial for trial in trials if REFUSED in trial.user_attrs]
    assert refused and all(trial.state == TrialState.PRUNED and "infeasible target" in trial.user_attrs[REFUSED] for trial in refused)


def test_defaults_that_cannot_be_run_are_bad_input(storage: BaseStorage) -> None:
    with pytest.raises(InputError, match="infeasible target"):
        searched(small_task("t_ttft=0.1:0.2"), storage, 4)
    assert storage.get_all_studies() == []


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_shedding_never_pays(sampler: str, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_shed_calls(replay: Replay) -> Measured:
        shed = float(replay.knobs["tau"]) > 1.0  # type: ignore[arg-type]
        return Measured({"ttft_p95_s": 1.0 if shed else 2.0, "calls_shed": 3.0 if shed else 0.0}, 0.0)

    monkeypatch.setattr(searching, "measure", with_shed_calls)
    task = small_task("tau,linger", "ttft_p95_s")
    from talaria.tune.validate import candidates, choose

    trials = searched(task, storage, 20, sampler=sampler).studied.finished()
    assert {trial.params["tau"] > 1.0 for trial in trials} == {True, False}
    assert all(trial.params["tau"] <= 1.0 for trial in [choose(task, trials), *candidates(task, trials)])


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the n-th replay (from 1) end as if Ctrl-C had been pressed in it."""

    def arm(number: int) -> None:
        calls = iter(range(1, 10_000))

        def interruptible(replay: Replay) -> Measured:
            if next(calls) == number:
                raise KeyboardInterrupt
            return measure(replay)

        monkeypatch.setattr(searching, "measure", interruptible)

    return arm


def test_an_interrupt_keeps_what_is_finished_and_the_rest_is_run_again(storage: BaseStorage, interrupted_at: Any) -> None:
    task = small_task()
    interrupted_at(13)  # four trials of two draws have ended; the third round's first draw is under way
    with pytest.raises(KeyboardInterrupt):
        searched(task, storage, 8)
    (study,) = storage.get_all_studies()
    states = [trial.state for trial in storage.get_all_trials(study._study_id)]
    assert states == [TrialState.COMPLETE] * 4 + [TrialState.FAIL] * 4 + [TrialState.WAITING] * 4
    trials = searched(task, storage, 8).studied.trials()
    given_up, again = trials[4:8], trials[8:]
    assert [trial.state for trial in trials if trial.state in FINISHED] == [TrialState.COMPLETE] * 8
    assert [trial.params for trial in again] == [trial.params for trial in given_up]


def test_a_trial_that_was_interrupted_many_times_is_still_run(storage: BaseStorage, interrupted_at: Any) -> None:
    for _ in range(MOST_DEATHS + 2):
        interrupted_at(1)
        with pytest.raises(KeyboardInterrupt):
            searched(small_task(), storage, 2)
    trials = searched(small_task(), storage, 2).studied.finished()
    assert len(trials) == 2 and trials[0].params == small_task().first


class Clock:
    """Stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("talaria.tune.beats.time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    yield Clock(monkeypatch)
    monkeypatch.undo()


def running_study(storage: BaseStorage) -> tuple[optuna.Study, optuna.Trial]:
    study = optuna.create_study(storage=storage)
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    return study, trial


def test_a_trial_whose_counter_stands_still_is_queued_again_with_its_parameters(storage: BaseStorage, clock: Clock) -> None:
    study, trial = running_study(storage)
    watcher = Beats(study, Pulse(grace_s=60.0))
    assert not watcher.retry_dead(study.trials)
    clock.now_s += 59.0
    trial.set_user_attr(BEAT, 1)
    assert not watcher.retry_dead(study.trials)
    clock.now_s += 59.0
    assert not watcher.retry_dead(study.trials)
    clock.now_s += 2.0
    assert watcher.retry_dead(study.trials)
    dead, again = study.trials
    assert (dead.state, again.state, again.params) == (TrialState.FAIL, TrialState.WAITING, trial.params)
    assert BEAT not in again.user_attrs and WORKER not in again.user_attrs


def test_a_process_never_gives_up_its_own_trials(storage: BaseStorage, clock: Clock) -> None:
    study, trial = running_study(storage)
    watcher = Beats(study, Pulse(grace_s=60.0))
    watcher.start(trial)
    watcher.retry_dead(study.trials)
    clock.now_s += 1000.0
    assert not watcher.retry_dead(study.trials)


def test_a_result_that_comes_after_its_trial_was_given_up_is_dropped(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    task, given_up = small_task(), set()

    def outlived(replay: Replay) -> Measured:
        study = optuna.load_study(study_name="small", storage=storage)
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            if trial.number in (1, 2) and trial.number not in given_up:
                given_up.add(trial.number)
                give_back(study, trial)
        return measure(replay)

    monkeypatch.setattr(searching, "measure", outlived)
    trials = searched(task, storage, 6).studied.trials()
    finished = [trial for trial in trials if trial.state in FINISHED]
    assert given_up == {1, 2} and len(finished) == 6 and len({str(trial.params) for trial in finished}) == 6


def test_a_second_process_that_queues_the_defaults_too_does_not_run_them_twice(storage: BaseStorage) -> None:
    search = Search(small_task(), storage, "small", 3, sampler="tpe", seed=0, pulse=Pulse())
    for _ in range(2):  # both have read the study before the other had written
        search.studied._queue_planned([])
    with Pool(100, 1) as pool:
        search.run(pool, lambda finished: None)
    assert [trial.params == search.task.first for trial in search.studied.finished()] == [True, False, False]


def test_one_more_than_is_wanted_is_withdrawn(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched(small_task(), storage, 3)
    read = search.studied.trials
    stale = [read()[:1]]  # read before two others had finished theirs
    monkeypatch.setattr(search.studied, "trials", lambda: stale.pop() if stale else read())
    assert search.studied.ask() is None
    assert [trial.state for trial in search.studied.trials()].count(TrialState.FAIL) == 1
    assert len(search.studied.finished()) == 3


CHANGES: list[tuple[Task, str]] = [
    (small_task(gap_cap_s=11), "scenarios: small has changed since"),
    (small_task("tau"), "knobs: linger low 0.0, high 3.0, now linger absent"),
    (small_task(objective="ttft_p95_s"), "objectives"),
    (small_task(constraints=["deadline_risk<=5"]), "constraints"),
    (small_task(seeds=(0, 1, 2)), "draws: 0, 1, now 0, 1, 2"),
]


@pytest.mark.parametrize(("changed", "said"), CHANGES, ids=[said for _, said in CHANGES])
def test_a_study_of_something_else_is_refused_and_left_as_it_is(changed: Task, said: str, storage: BaseStorage) -> None:
    before = told(searched(small_task(), storage, 2))
    with pytest.raises(InputError, match="study small: was begun with other") as raised:
        searched(changed, storage, 4)
    assert said in str(raised.value)
    assert told(searched(small_task(), storage, 2)) == before


def test_a_study_of_somebody_else_is_refused(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.tune.study.APPEARS_S", 0.0)
    optuna.create_study(storage=storage, study_name="small")
    with pytest.raises(InputError, match=r"is no study of talaria's \(schema None\)"):
        searched(small_task(), storage, 2)


def test_an_infinite_value_is_never_the_policy(storage: BaseStorage) -> None:
    from talaria.tune.validate import candidates

    task = small_task()
    assert parse_objectives("sct_p95_s") == task.objectives

    def trial(value: float) -> FrozenTrial:
        return optuna.trial.create_trial(value=value, user_attrs={DRAWS: [[{"sct_p95_s": value, "calls_shed": 0.0}]]})

    assert candidates(task, [trial(math.inf), trial(3.0)])[0].value == 3.0
