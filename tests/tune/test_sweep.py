"""Sweeps as studies: points, grids, interrupts, holes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage

from talaria.sim.run import simulate
from talaria.tune import sweep
from talaria.tune.sweep import Axis
from tests.tune.small import swept, with_knobs


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the n-th simulation (from 1) end as if Ctrl-C had been pressed in it."""

    def arm(number: int) -> None:
        calls = itertools.count(1)

        def interruptible(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return simulate(*arguments, **keywords)

        monkeypatch.setattr("talaria.sim.batch.simulate", interruptible)

    return arm


def test_an_interrupted_sweep_keeps_its_whole_points_and_goes_on_with_the_others(tmp_path: Path, interrupted_at: Any) -> None:
    axes, storage = [Axis("tau", (0.0, 1.0, 5.0))], InMemoryStorage()
    interrupted_at(6)
    chosen, whole = swept(axes, 2, storage)
    document = sweep.finish(chosen, tmp_path, None)
    assert not whole and document is not None
    assert [point["value"] for point in document["points"]] == [0.0, 1.0]
    assert document["plot"] == str(tmp_path / "sweep-tau.png") and (tmp_path / "sweep-tau.png").stat().st_size > 1000
    again, whole = swept(axes, 2, storage)
    alone, _ = swept(axes, 2)
    assert whole and again.points() == alone.points()


def test_a_sweep_without_a_whole_point_draws_nothing(tmp_path: Path, interrupted_at: Any) -> None:
    interrupted_at(2)
    chosen, whole = swept([Axis("tau", (0.0, 1.0))], 2)
    assert not whole and sweep.finish(chosen, tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_two_knobs_covers_the_grid_and_draws_it_even_with_holes(tmp_path: Path, interrupted_at: Any) -> None:
    interrupted_at(4)
    chosen, _ = swept([Axis("tau", (0.0, 1.0)), Axis("linger", (0.0, 1.5))], 1)
    document = sweep.finish(chosen, tmp_path, None)
    assert document is not None and document["knob"] == "tau,linger"
    assert [point["value"] for point in document["points"]] == [[0.0, 0.0], [0.0, 1.5], [1.0, 0.0]]
    assert (tmp_path / "sweep-tau-linger.png").exists()


def test_more_points_than_a_batch_and_names_as_values_are_swept_too() -> None:
    chosen, whole = swept([Axis("overload", ("queue", "shed", "spill")), Axis("visit_idle", (False, True))], 1)
    assert whole and [point.values for point in chosen.points()] == sweep.grid(chosen.axes)


def test_each_point_of_a_sweep_runs_with_its_own_knob_values() -> None:
    cases = sweep.cases([Axis("tau", (0.0, 5.0)), Axis("visit_idle", (True,))], with_knobs, None)
    assert [(case.label, case.plan.knobs.tau_s, case.plan.knobs.visit_idle) for case in cases] == [
        ("tau=0.0,visit_idle=true", 0.0, True), ("tau=5.0,visit_idle=true", 5.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "scenario"), [("tau", "paper-tp4-tau"), ("gamma", "paper-tp8"), ("linger,nu", "four-by-five"), ("linger", "quickstart")]
)
def test_a_knob_is_swept_where_it_trades_something(knobs: str, scenario: str) -> None:
    assert sweep.default_scenario([Axis(name, ()) for name in knobs.split(",")]) == scenario
