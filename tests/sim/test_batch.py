"""Batches keep what is finished, in order, with documents that depend on their inputs only."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from talaria.errors import InputError
from talaria.report import comparison
from talaria.report.metrics import metrics
from talaria.sim import compare
from talaria.sim.batch import Batch, Case
from talaria.sim.config import CONFIGS
from talaria.sim.run import simulate
from tests.sim.small import small_plan


def finished(batch: Batch, jobs: int | None = None) -> dict[str, Any]:
    """Run ``jobs`` of the batch's jobs (all by default) as if interrupted then."""
    outcomes = batch.run()
    assert len(list(islice(outcomes, jobs))) == (jobs or len(batch.jobs))
    outcomes.close()
    return batch.finish(peak_rss_mib=1.0)


def test_a_batch_gives_each_seed_the_metrics_of_its_own_run() -> None:
    small = small_plan()
    with Batch([Case("a", small)], range(3, 5), by_seed=True) as batch:
        document = finished(batch)["a"]
    assert [result.metrics for result in batch.results["a"]] == [metrics(simulate(small, seed)) for seed in (3, 4)]
    assert (document["seeds"], document["config"], document["scenario"]) == ([3, 4], "talaria", "quickstart")
    assert document["policy"]["tau"] == 1.0 and set(document["provenance"]["profiles"]) == {"paper-tp8"}
    assert document["host"]["sim_cpu_s"] > 0.0


@pytest.fixture
def bare_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without content: drawing them takes most of a run's time, and tests/report looks at them."""
    monkeypatch.setattr("talaria.report.html.render", lambda *_: "")


@pytest.mark.usefixtures("bare_pages")
def test_an_interrupted_run_keeps_its_finished_seeds(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Batch([Case("a", small_plan(), out)], range(5), by_seed=True, decisions=True, timeline=True) as batch:
        finished(batch, jobs=2)
    assert json.loads((out / "run.json").read_text())["seeds"] == [0, 1]
    assert {"calls.parquet", "report.html", "decisions.jsonl", "timeline.json"} <= {path.name for path in out.iterdir()}


def test_a_run_that_finished_nothing_leaves_nothing(tmp_path: Path) -> None:
    with Batch([Case("a", small_plan(), tmp_path / "run")], range(5), by_seed=True, decisions=True) as batch:
        assert batch.finish(peak_rss_mib=1.0) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_somebody_elses_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("")
    cases = [Case(name, small_plan(), tmp_path / name) for name in ("a", "b")]
    with pytest.raises(InputError, match=r"thesis\.tex"):
        Batch(cases, range(1), by_seed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_interrupted_comparison_is_paired_over_the_seeds_that_both_sides_finished() -> None:
    cases = compare.cases(["talaria", "no-sp"], lambda config: small_plan(config_name=config.name), None)
    with Batch(cases, range(3), by_seed=True) as batch:
        document = compare.document(batch, finished(batch, jobs=5))
    runs = document["configs"]
    assert [len(runs[name]["seeds"]) for name in ("talaria", "no-sp")] == [3, 2]
    difference = next(entry for entry in document["paired"] if entry["metric"] == "sct_mean_s")
    pairs = list(zip(*(runs[name]["per_seed"] for name in ("talaria", "no-sp")), strict=False))
    assert difference["diff"] == pytest.approx(sum(a["sct_mean_s"] - b["sct_mean_s"] for a, b in pairs) / 2, rel=1e-6)


@pytest.mark.usefixtures("bare_pages")
def test_a_comparison_writes_a_document_a_figure_and_a_run_directory_per_configuration(tmp_path: Path) -> None:
    cases = compare.cases(["talaria", "no-sp"], lambda config: small_plan(config_name=config.name), tmp_path)
    with Batch(cases, range(2), by_seed=True) as batch:
        document = compare.document(batch, finished(batch))
        comparison.write(tmp_path, document, batch.records)
    assert {path.name for path in tmp_path.iterdir()} == {"compare.json", "compare.png", "latency.png", "switches.png", "talaria", "no-sp"}
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["schema"] == "talaria.compare/1" and "host" not in written["configs"]["talaria"]


def test_every_default_of_a_comparison_is_a_config() -> None:
    assert set(compare.MECHANISMS) <= set(CONFIGS)
