"""``talaria-gpu validate`` finds what is off between two runs of one trace. Simulated runs stand in for real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from talaria.cli.gpu import run_command
from talaria.cli.main import run_command as run_sim
from talaria.gpu.validation.joined import errors
from talaria.gpu.validation.terms import pairs, summary
from talaria.report.files import read_run

TRACE = ("--trace", "trace.jsonl", "--seeds", "2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``real`` with decisions, ``right`` with the same timing, ``wrong`` with a router that is blind to residency."""
    directory = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert run_sim(["trace", "generate", "quickstart", "-o", "trace.jsonl"]) == 0
        assert run_sim(["run", *TRACE, "--out", "real", "--decisions"]) == 0
        assert run_sim(["run", *TRACE, "--out", "right"]) == 0
        assert run_sim(["run", *TRACE, "--out", "wrong", "--config", "round-only"]) == 0
    return directory


def validated(capsys: pytest.CaptureFixture[str], runs: Path, sim: str, *options: str, code: int) -> Any:
    capsys.readouterr()
    assert run_command(["validate", str(runs / sim), str(runs / "real"), "--json", *options]) == code
    return json.loads(capsys.readouterr().out)


def test_the_same_run_has_no_errors(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = validated(capsys, runs, "right", code=0)
    assert found["passed"] and found["bar"]["error"] == 0 and found["sessions"]["mae_s"] == 0 and found["sessions"]["count"] == 12
    assert found["calls"]["ttft_s"]["count"] == 120 and found["calls"]["ttft_s"]["unmatched"] == 0
    assert {row["metric"]: row["error"] for row in found["metrics"]}["sct_p50_s"] == 0
    mix = found["switches"]
    assert mix["difference"] == 0 and mix["simulated"] == mix["measured"] and sum(mix["measured"].values()) == pytest.approx(1)


def test_another_system_is_outside_the_bar_and_its_sessions_say_by_how_much(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = validated(capsys, runs, "wrong", "--out", str(tmp_path / "out"), code=1)
    assert not found["bar"]["passed"] and found["decisions"]["differences"] == 0
    mix = found["switches"]
    assert mix["simulated"]["h2d"] == 1 > mix["measured"]["h2d"]
    assert mix["difference"] == pytest.approx(1 - mix["measured"]["h2d"], abs=1e-6)
    assert found["sessions"]["bias_s"] > 0 and found["sessions"]["mae_s"] >= found["sessions"]["bias_s"]
    rows = pq.read_table(tmp_path / "out" / "calls.parquet").to_pylist()
    assert len(rows) == 120 and sum(row["worst_term"] is not None for row in rows) > 100
    assert (tmp_path / "out" / "validation.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "validation.json").read_text()) == found


def test_terms_of_every_placed_call_are_predicted_and_happened(runs: Path) -> None:
    _, (record, _) = read_run(runs / "real")
    found = pairs(runs / "real" / "decisions.jsonl", record, 0.0)
    assert len(found) == len({pair.key for pair in found}) == 120
    times = {(pair.key.session, pair.key.turn): sum(pair.happened) for pair in found}
    names = record.session_names
    assert names is not None
    columns = (record.calls[name].tolist() for name in ("session", "turn", "e2e_s", "placed_s"))
    for session, turn, e2e_s, placed_s in zip(*columns, strict=True):
        assert times[names[session], turn] == pytest.approx(e2e_s - placed_s, abs=1e-3), "the terms add up to the call"
    terms = summary(found)
    assert sum(term.worst_of for term in terms.values()) == 120 and all(term.mae_s >= abs(term.bias_s) for term in terms.values())


def test_decisions_that_differ_fail_the_validation(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = runs / "real" / "decisions.jsonl"
    whole = log.read_text()
    try:
        log.write_text(whole.replace('"out":{"Routed":{"call_id":1,', '"out":{"Routed":{"call_id":99,', 1))
        found = validated(capsys, runs, "right", code=1)
    finally:
        log.write_text(whole)
    assert found["decisions"]["differences"] == 1 and not found["passed"] and found["bar"]["passed"]


def test_a_run_without_decisions_cannot_be_validated(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_command(["validate", str(runs / "real"), str(runs / "right")]) == 2
    assert "has no decisions.jsonl" in capsys.readouterr().err


def test_errors_are_simulated_less_measured_over_what_both_have() -> None:
    found = errors({"a": 3.0, "b": 1.0, "c": 9.0}, {"a": 2.0, "b": 2.0, "d": 1.0})
    assert (found.count, found.unmatched, found.bias_s, found.mae_s, found.p95_s, found.mae_share) == (2, 2, 0.0, 1.0, 1.0, 0.5)
