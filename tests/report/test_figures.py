"""Every figure draws what it is given, labelled with units, and the same picture every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pytest

from talaria.report import figures, sweep_figures
from talaria.report.figures import MOST_POINTS
from talaria.report.metrics import METRICS
from talaria.report.statistics import Estimate, estimate
from talaria.report.style import to_png, to_svg
from tests.report.synthetic import add_call, empty_record, plausible_record, small_record

ONE = {"talaria": [plausible_record(sessions=3)]}
TWO = {"talaria": [plausible_record(sessions=3)], "no-sp": [plausible_record("no-sp", sessions=3, slowdown=2.0)]}
NOTHING = {"talaria": [empty_record()]}


def points(values: int) -> list[dict[str, Estimate]]:
    return [{name: estimate([0.1 * step, 0.1 * step + 0.02, 0.1 * step + 0.04]) for name in METRICS} for step in range(values)]


DRAWINGS: dict[str, Callable[[], Any]] = {
    "latency of one run": lambda: figures.latency_cdfs(ONE),
    "latency of two configurations": lambda: figures.latency_cdfs(TWO),
    "sessions by configuration": lambda: figures.sct_by_configuration(TWO),
    "rounds": lambda: figures.round_composition(ONE["talaria"][0], 9.0),
    "switches": lambda: figures.switch_latency(TWO),
    "memory": lambda: figures.hbm_footprint(ONE["talaria"][0]),
    "sweep": lambda: sweep_figures.sweep_tradeoff("tau", "s", [0.0, 0.5, 1.0], points(3)),
    "sweep of names": lambda: sweep_figures.sweep_tradeoff("overload", "", ["queue", "shed"], points(2)),
    "two knobs": lambda: sweep_figures.heat_maps(("tau", "nu"), [0.0, 1.0], [1.0, 5.0], {"residency_hit": [[0.5, None], [0.7, 0.9]]}),
}
EMPTY: dict[str, Callable[[], Any]] = {
    "latency": lambda: figures.latency_cdfs(NOTHING),
    "sessions by configuration": lambda: figures.sct_by_configuration(NOTHING),
    "rounds": lambda: figures.round_composition(empty_record()),
    "switches": lambda: figures.switch_latency(NOTHING),
    "memory": lambda: figures.hbm_footprint(empty_record()),
    "undefined sweep": lambda: sweep_figures.sweep_tradeoff("tau", "s", [0.0, 1.0], [dict.fromkeys(METRICS, estimate([]))] * 2),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_axis_that_shows_numbers_names_them(name: str) -> None:
    for axes in DRAWINGS[name]().axes:
        assert axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel() or axes.get_yticklabels()


@pytest.mark.parametrize("name", ["latency of two configurations", "sessions by configuration", "memory"])
def test_the_same_data_gives_the_same_svg(name: str) -> None:
    assert to_svg(DRAWINGS[name]()) == to_svg(DRAWINGS[name]())


@pytest.mark.parametrize("name", EMPTY)
def test_a_figure_without_data_still_draws(name: str) -> None:
    assert to_png(EMPTY[name]()).startswith(b"\x89PNG")


def test_drawing_leaves_matplotlib_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    to_svg(DRAWINGS["rounds"]())
    assert dict(matplotlib.rcParams) == before


def test_a_distribution_ends_at_all_of_its_observations() -> None:
    _, calls = figures.latency_cdfs({"talaria": [small_record()]}).axes
    everything, returns = calls.get_lines()
    assert everything.get_xdata().tolist() == [0.5, 1.0, 1.0, 2.0, 3.0, 4.0, 8.0]
    assert everything.get_ydata()[-1] == returns.get_ydata()[-1] == 1.0


def test_a_large_sample_is_thinned_but_keeps_its_ends() -> None:
    record = empty_record()
    for number in range(5 * MOST_POINTS):
        add_call(record, number, 0, 0.0, 1.0 + number, 2.0 + number)
    line = figures.latency_cdfs({"talaria": [record]}).axes[1].get_lines()[0]
    assert len(line.get_xdata()) == MOST_POINTS
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (1.0, 5.0 * MOST_POINTS)


def bar_tops(axes: Any) -> list[float]:
    return list(np.max([layer.get_data().values for layer in axes.patches], axis=0))


def test_bars_of_the_round_composition_stack_to_the_mean_length_of_measured_rounds() -> None:
    # Rounds of 14 s and 11 s start within 14 s of each other, so they share a bar; the warm-up round is left out.
    assert bar_tops(figures.round_composition(small_record()).axes[0]) == pytest.approx([12.5])


def test_rounds_that_follow_each_other_leave_no_bar_empty() -> None:
    record = empty_record()
    for number, wall_s in enumerate([9.0, 4.0] * 30):
        record.rounds.append(0, number, 6.5 * number, wall_s, wall_s - 1.0, 1.0, wall_s, 1, 0, 0, 0, 0)
    tops = bar_tops(figures.round_composition(record).axes[0])
    assert len(tops) == 42  # 383.5 s from the first start to the last, in stretches of at least 9 s
    assert min(tops) >= 4.0


def test_numbers_over_many_decades_and_names_stand_side_by_side() -> None:
    def positions(values: list[Any]) -> list[float]:
        axes = sweep_figures.sweep_tradeoff("knob", "", values, points(len(values))).axes[0]
        return list(axes.get_xticks())

    assert positions([0.0, 0.5, 2.0]) == [0.0, 0.5, 2.0]
    assert positions([0.001, 1.0, 10.0]) == [0.0, 1.0, 2.0]
    assert positions([False, True]) == [0.0, 1.0]
    assert np.all(np.diff(positions(["queue", "shed", "spill"])) == 1.0)
