"""The shipped targets are the published list, whole and once each, and everything that they name exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from talaria.report.record import RunRecord
from talaria.reproduce import targets
from talaria.reproduce.experiments import DRAWN, EXPERIMENTS, SETTINGS, experiment
from talaria.reproduce.measures import of_components, of_draw, of_run
from talaria.reproduce.targets import ComponentSource, CurveSource, DrawSource, RunSource, SettingSource
from talaria.sim import components
from talaria.sim.components import simulate_components
from talaria.workload.open import open_workload

SHIPPED = targets.load()
WORDS = ("source", "note")


def leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every published number by its place; lists of numbers and names whole, pairs of percentiles one by one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in WORDS:
                yield from leaves(inner, (*place, key))
    elif isinstance(value, list) and "component_run_per_rank_ms" in place:
        yield "/".join((*place, "p50")), value[0]
        yield "/".join((*place, "p95")), value[1]
    else:
        yield "/".join(place), value


def test_every_published_number_is_a_target_once_and_nothing_else_is(shared: Path) -> None:
    published = list(leaves(json.loads((shared / "spec" / "paper_numbers.json").read_text(encoding="utf-8"))))
    shipped = [(f"{group.root}/{target.at}", target.value) for group, target in SHIPPED.targets()]
    assert sorted(shipped, key=str) == sorted(published, key=str) and len({place for place, _ in shipped}) == len(shipped) > 100


def test_the_source_is_named_as_in_the_published_list(shared: Path) -> None:
    assert SHIPPED.source == json.loads((shared / "spec" / "paper_numbers.json").read_text(encoding="utf-8"))["source"]


def test_everything_that_a_target_names_exists() -> None:
    run_measures = {*of_run(RunRecord("", "", 0, (), ())), "sessions_improved"}
    component_measures = of_components(simulate_components(components.load().model_copy(update={"repeats": 1}), 0))
    draw_measures = of_draw(open_workload({"preset": "quickstart"}, 0))[0]
    for _, target in SHIPPED.targets():
        match target.by:
            case RunSource() as by:
                assert experiment(by) in EXPERIMENTS and by.metric in run_measures
                assert (by.versus is None) == (by.metric != "sessions_improved")
            case ComponentSource() as by:
                assert by.measure in component_measures
            case DrawSource() as by:
                assert by.workload in DRAWN and by.statistic in draw_measures
            case SettingSource() as by:
                assert by.setting in SETTINGS and by.scenario in {key.scenario for key in EXPERIMENTS}
            case CurveSource() as by:
                assert by.profile == "paper-tp8"
        assert set(target.notes) <= set(SHIPPED.notes)


def test_every_note_has_a_number_that_it_belongs_to() -> None:
    assert {key for _, target in SHIPPED.targets() for key in target.notes} == set(SHIPPED.notes)


@pytest.mark.parametrize("note", ["switch_sum", "two_traces", "sweep_gaps", "cliff"])
def test_contradictions_of_the_published_numbers_are_noted(note: str) -> None:
    assert note in SHIPPED.notes
