"""Tables fit a terminal of 100 columns and say what the documents hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from talaria.report.document import SweepPoint, compare_document, sweep_document
from talaria.report.metrics import METRICS, metrics
from talaria.report.statistics import SeedResult, paired, sct_by_session
from talaria.report.tables import COMPARED, GROUPS, SWEPT, compare_table, number, run_table, sweep_table, with_margin
from tests.report.synthetic import plausible_record
from tests.report.test_document import small_document

WIDTH = 100
PEERS = ("aegaeon", "serverlessllm", "preble", "mooncake", "continuum", "sglang-cache-aware")
CONFIGS = {"talaria": 1.0, "no-sp": 2.5, "no-hkvr": 2.0, "h2d-only": 1.1, "round-only": 4.0}


def render(table: Any, width: int = WIDTH) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def comparison(width: int = WIDTH, configs: Mapping[str, float] = CONFIGS) -> str:
    records = {name: [plausible_record(name, seed, sessions=3, slowdown=slow) for seed in (0, 1)] for name, slow in configs.items()}
    results = {name: [SeedResult(metrics(record), sct_by_session(record)) for record in runs] for name, runs in records.items()}
    document = compare_document({name: small_document(config=name) for name in configs}, paired(results))
    return render(compare_table(document), width)


def sweep(knobs: tuple[str, ...], values: list[tuple[float, ...]]) -> str:
    points = [SweepPoint(value, tuple(metrics(plausible_record(seed=seed, sessions=3)) for seed in (0, 1))) for value in values]
    document = sweep_document(knobs=knobs, points=points, scenario="s", config="talaria", seeds=[0, 1], provenance={}, plot=None)
    return render(sweep_table(document))


def test_every_metric_is_in_exactly_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(METRICS)
    assert {*COMPARED, *SWEPT} <= set(METRICS)


@pytest.mark.parametrize("text", [render(run_table(small_document())), comparison(), sweep(("tau", "nu"), [(0.0, 1.0), (0.5, 20.0)])])
def test_no_line_is_wider_than_the_terminal(text: str) -> None:
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text


def test_the_run_table_shows_every_metric_with_its_value() -> None:
    text = render(run_table(small_document()))
    for name in METRICS:
        assert re.search(rf"(^|\s){name} +{re.escape(number(small_document()['metrics'][name]))}(\s|$)", text), name


def test_differences_are_shown_against_the_first_configuration() -> None:
    lines = comparison().splitlines()
    changes = lines[next(number for number, line in enumerate(lines) if "sct_p50_s" in line) + 1].split()
    assert len(changes) == len(CONFIGS) - 1
    assert all(change.startswith("+") for change in changes)  # every other one is slower


def test_the_other_systems_fit_with_their_whole_names() -> None:
    lines = comparison(configs=dict.fromkeys(("full", *PEERS), 2.0)).splitlines()
    assert max(map(len, lines)) <= WIDTH and "…" not in "\n".join(lines)
    heading = " ".join(lines[: next(number for number, line in enumerate(lines) if "──" in line)]).split()
    assert {part for name in PEERS for part in re.findall(r"[a-z]+-?", name)} <= set(heading)


def test_a_sweep_has_one_row_per_value_and_one_column_per_knob() -> None:
    rows = [line.split()[:2] for line in sweep(("tau", "nu"), [(0.0, 1.0), (0.5, 20.0)]).splitlines() if "±" not in line]
    assert rows[-2:] == [["0", "1"], ["0.5", "20"]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0, "0"), (960.0, "960"), (1632.4, "1,632"), (0.72512, "0.7251"), (0.0000123, "1.2e-05"), (-2.5, "-2.5")],
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("mean", "high", "shown"),
    [
        (0.6646, 0.6946, "0.665±0.030"),
        (153.4, 247.4, "153±94"),
        (1610.2, 2844.2, "1,610±1,234"),
        (1.0, 1.0, "1"),
        (5.0, None, "5"),
        (None, None, "–"),
    ],
)
def test_a_margin_sets_the_digits_of_its_mean(mean: float | None, high: float | None, shown: str) -> None:
    assert with_margin(mean, [None, high]) == shown


def test_a_title_longer_than_its_table_stays_on_one_line() -> None:
    records = {name: [plausible_record(name, seed, sessions=3) for seed in (0, 1)] for name in ("talaria", "no-sp")}
    results = {name: [SeedResult(metrics(record), sct_by_session(record)) for record in runs] for name, runs in records.items()}
    documents = {name: small_document(config=name) for name in results}
    assert "95 % interval" in render(compare_table(compare_document(documents, paired(results)))).splitlines()[0]


def test_a_comparison_of_five_cuts_no_number_on_80_columns() -> None:
    narrow, wide = comparison(80), comparison()
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow
    numbers = [sorted(re.findall(r"[\d.,]+", text)) for text in (narrow, wide)]
    assert numbers[0] == numbers[1]
