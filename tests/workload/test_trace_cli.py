"""``talaria-sim trace``: results on stdout, everything else on stderr, exit code 2 and one line for anything wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from talaria.cli.main import run_command
from talaria.workload.trace import TraceFile
from tests.workload.recordings import RECORDINGS, WEKA_TRACE


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording.jsonl"
    path.write_text(RECORDINGS["weka"])
    return path


def test_import_writes_a_valid_trace_and_reports_on_stderr(tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.jsonl.gz"
    assert run_command(["trace", "import", str(recording), "--format", "weka", "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0] == f"{out}: 1 session, 4 calls"
    assert run_command(["trace", "validate", str(out)]) == 0
    assert "valid, 1 session, 4 calls, models big, small" in capsys.readouterr().out


def test_import_says_how_many_duplicates_it_dropped(tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_text(json.dumps(WEKA_TRACE) + "\n" + json.dumps({**WEKA_TRACE, "id": "copy"}) + "\n")
    assert run_command(["trace", "import", str(recording), "--dedup", "-o", str(tmp_path / "t.jsonl")]) == 0
    assert "1 sessions with the same prompts and outputs as an earlier one dropped" in capsys.readouterr().err


def test_a_broken_recording_exits_with_2_and_one_line_and_writes_nothing(
    tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.write_text(RECORDINGS["weka"] + '{"id": 3}\n')
    out = tmp_path / "t.jsonl"
    assert run_command(["trace", "import", str(recording), "-o", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"{recording}:2" in said.err
    assert not out.exists()


def test_stats_prints_the_regime_table_of_any_format(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", "stats", str(recording)]) == 0
    said = capsys.readouterr()
    assert "depth p50" in said.out
    assert "estimated, not recorded: gap_s, reuse_tokens" in said.out
    assert said.err.startswith("read as weka: 1 session, 4 calls")


def test_stats_json_is_one_document(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", "stats", str(recording), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["sessions"], document["calls"], document["lines"]) == ("talaria.trace-stats/1", 1, 4, 2)


def test_generate_draws_the_same_trace_for_the_same_seed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, seed in zip(paths, ("7", "7", "8"), strict=True):
        assert run_command(["trace", "generate", "corpus", "--seed", seed, "--sessions", "3", "-o", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(list(TraceFile(paths[0]).sessions())) == 3
    assert [call for session in TraceFile(paths[2]).sessions() for call in session.calls] != [
        call for session in TraceFile(paths[0]).sessions() for call in session.calls
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "corpsu", "-o", "x"], "did you mean 'corpus'"),
        (["generate", "corpus", "-o", "x", "--seed", "-1"], "--seed: -1 is negative"),
        (["validate", "absent.jsonl"], "cannot read"),
        (["import", "absent.jsonl", "-o", "x"], "absent.jsonl: cannot read"),
        (["import", "absent.jsonl", "-o", "x", "--format", "wekka"], "did you mean 'weka'"),
    ],
)
def test_a_wrong_argument_exits_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["trace", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_validate_points_other_formats_to_import(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trace", "validate", str(recording)]) == 2
    assert "talaria-sim trace import" in capsys.readouterr().err
