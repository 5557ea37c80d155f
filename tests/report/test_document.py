"""The JSON documents have the contract's shape and nothing in them depends on the machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.report.document import (
    Document,
    Host,
    SweepPoint,
    compare_document,
    for_file,
    rounded,
    run_document,
    sweep_document,
    to_json,
)
from talaria.report.metrics import METRICS, metrics
from talaria.report.schema import read_run_document
from talaria.report.statistics import SeedResult, paired, sct_by_session
from tests.report.synthetic import small_record

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def small_document(seeds: int = 2, host: Host | None = None, config: str = "talaria") -> Document:
    return run_document(
        scenario="by-hand",
        config=config,
        policy={"tau": 1.0, "overload": "spill"},
        trace={"name": "by-hand", "sessions": 5},
        seeds=range(seeds),
        per_seed=[metrics(small_record())] * seeds,
        provenance={"version": "0.1.0", "profiles": {"paper-tp8": "0123456789ab"}},
        host=host,
    )


def test_a_run_document_has_the_keys_of_the_contract() -> None:
    document = small_document(host=Host(0.05, 0.2, 120.0))
    assert " ".join(sorted(document)) == "config host metrics per_seed policy provenance scenario schema seeds spread trace"
    assert document["schema"] == "talaria.run/1"
    assert set(document["metrics"]) == set(document["spread"]) == set(METRICS)
    assert document["spread"]["sct_p50_s"] == {"std": 0.0, "ci95": [11.0, 11.0]}
    assert set(document["host"]) == {"sim_cpu_s", "wall_s", "peak_rss_mib"}


def test_one_seed_has_no_spread() -> None:
    assert small_document(seeds=1)["spread"]["sct_p50_s"] == {"std": None, "ci95": [None, None]}


def test_a_comparison_holds_run_documents_without_schema_and_every_paired_difference() -> None:
    runs = {name: small_document(config=name, host=Host(1.0, 1.0, 1.0)) for name in ("talaria", "no-sp")}
    record = small_record()
    results = {name: [SeedResult(metrics(record), sct_by_session(record))] * 2 for name in runs}
    document = compare_document(runs, paired(results))
    assert set(document) == {"schema", "configs", "paired"}
    assert "schema" not in document["configs"]["talaria"]
    assert {entry["metric"] for entry in document["paired"]} == {*METRICS, "sessions_improved"}
    assert set(document["paired"][0]) == {"a", "b", "metric", "diff", "ci95"}
    assert "host" not in for_file(document)["configs"]["no-sp"]


@pytest.mark.parametrize(("knobs", "values", "shown"), [(("tau",), (0.5,), 0.5), (("tau", "nu"), (0.5, 2.0), [0.5, 2.0])])
def test_a_sweep_point_has_one_value_per_knob(knobs: tuple[str, ...], values: tuple[float, ...], shown: Any) -> None:
    point = SweepPoint(values, (metrics(small_record()),))
    document = sweep_document(
        knobs=knobs, points=[point], scenario="quickstart", config="talaria", seeds=[0], provenance={}, plot="sweep-tau.png"
    )
    assert document["schema"] == "talaria.sweep/1"
    assert document["knob"] == ",".join(knobs)
    assert document["points"][0]["value"] == shown
    assert set(document["points"][0]) == {"value", "metrics", "spread"}


def test_the_host_is_printed_and_never_filed() -> None:
    assert for_file(small_document(host=Host(0.05, 0.2, 120.0))) == small_document()


def test_floats_keep_nine_significant_digits_and_minus_zero_becomes_zero() -> None:
    assert rounded({"a": [1.23456789012, (2 / 3) * 1e-7, -0.0]}) == {"a": [1.23456789, 6.66666667e-08, 0.0]}
    assert math.copysign(1.0, rounded(-0.0)) == 1.0


@given(JSON_VALUES)
def test_rounding_twice_is_rounding_once(value: Any) -> None:
    assert rounded(rounded(value)) == rounded(value)


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=5))
def test_the_text_of_a_document_does_not_depend_on_the_order_of_its_keys(document: dict[str, Any]) -> None:
    assert to_json(document) == to_json(dict(reversed(document.items())))
    assert json.loads(to_json(document)) == document


def test_a_document_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json({"x": math.nan})


def test_a_document_read_back_equals_the_one_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(small_document()))
    assert to_json(read_run_document(path)) == to_json(small_document())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "document is not an object; allowed: an object with config"),
        ('{"schema": "talaria.run/9"}', "schema = 'talaria.run/9'; allowed: 'talaria.run/1'"),
        ('{"schema": "talaria.run/1"}', "missing field 'scenario'"),
    ],
)
def test_a_broken_document_is_refused_in_one_line_with_file_and_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_run_document(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {named}") and "\n" not in message


def test_a_comparison_s_directory_is_refused_with_the_runs_below_it(tmp_path: Path) -> None:
    for name in ("talaria", "no-sp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(InputError, match=r"name a run below it: no-sp, talaria$"):
        read_run_document(tmp_path / "run.json")


def test_a_missing_document_is_refused_with_what_would_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.json: cannot be read \(No such file or directory\)"):
        read_run_document(tmp_path / "run.json")
