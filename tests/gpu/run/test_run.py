"""``talaria-gpu run`` against a fake gateway: the loop is closed, every call is accounted for, the files are the simulator's."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from talaria.cli.gpu import run_command
from talaria.report.files import read_run
from talaria.report.metrics import METRICS
from talaria.workload.rules import TraceHeader
from talaria.workload.session import Session, TraceCall
from talaria.workload.trace import write_trace
from tests.gpu.run.fake import FakeGateway

GAP_S = 0.05
LATE_S = 30.0
"""A loaded machine is late, never early."""


def sessions(count: int = 4) -> list[Session]:
    """Each: two turns, a subagent on the other model beside the second, and a third turn that waits for both."""
    found = []
    for number in range(count):
        calls = (
            TraceCall("main", "opus", 0, 300, 8),
            TraceCall("main", "opus", 1, 400, 6, GAP_S, (0,), None, 0, 308),
            TraceCall("sub", "haiku", 0, 200, 5, 0.0, (0,), 0),
            TraceCall("main", "opus", 2, 500, 4, 0.0, (1, 2), None, 1, 406),
        )
        found.append(Session(f"s{number}", calls, shared_tokens=64))
    return found


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_trace("trace.jsonl", TraceHeader("small"), sessions())
    return "trace.jsonl"


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    got = run_command([*arguments, "--json"])
    printed = capsys.readouterr()
    assert got == code, printed.err
    return json.loads(printed.out) if printed.out else None


def test_a_run_directory_is_the_simulators(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway().serving() as gateway:
        printed = document(capsys, "run", "--url", gateway.url, "--trace", trace, "--map", "opus=big", "--out", "run", "--set", "tau=3")
    assert set(printed["metrics"]) == set(METRICS) and printed["metrics"]["calls_completed"] == 16
    assert (printed["scenario"], printed["config"], printed["policy"]["tau"]) == ("fake", "talaria", 3.0)
    assert printed["trace"]["models"] == {"opus": "big", "haiku": "small"}
    written, (record,) = read_run("run")
    assert {**written, "host": printed["host"]} == printed
    assert record.session_names is not None and sorted(record.session_names) == ["s0", "s1", "s2", "s3"]
    assert Counter(record.calls["line"].tolist()) == {0: 12, 1: 4}
    assert {path.name for path in Path("run").iterdir()} == {
        "run.json", "calls.parquet", "rounds.parquet", "slots.parquet", "switches.parquet", "report.html", "timeline.json",
        "decisions.jsonl",
    }  # fmt: skip
    assert not Path(".run.resume").exists()


def test_lengths_are_forced_and_turns_continue_what_was_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway().serving() as gateway:
        document(capsys, "run", "--url", gateway.url, "--trace", trace, "--map", "opus=big")
    said = {(session, model, len(prompt)): (prompt, output) for session, model, prompt, output in gateway.prompts}
    assert Counter((len(prompt), len(output)) for prompt, output in said.values()) == {(300, 8): 4, (400, 6): 4, (200, 5): 4, (500, 4): 4}
    for name in ("s0", "s1", "s2", "s3"):
        (first, answer), (second, _) = said[name, "big", 300], said[name, "big", 400]
        assert second[:308] == first + answer and second[:309] != first + answer + first[:1]
    assert said["s0", "big", 300][0][:64] == said["s1", "big", 300][0][:64]


def test_calls_wait_for_what_the_trace_says_and_keep_their_gap(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway().serving() as gateway:
        document(capsys, "run", "--url", gateway.url, "--trace", trace, "--arrivals", "closed_pool:1", "--out", "run")
    _, (record,) = read_run("run")
    calls = record.calls
    for session in range(4):
        own = calls["session"] == session
        lines, turns, begins_s, e2e_s = (calls[name][own].tolist() for name in ("line", "turn", "enqueued_s", "e2e_s"))
        begins = dict(zip(zip(lines, turns, strict=True), begins_s, strict=True))
        ends = {key: begin + e2e for (key, begin), e2e in zip(begins.items(), e2e_s, strict=True)}
        assert ends[0, 0] + 0.9 * GAP_S <= begins[0, 1] <= ends[0, 0] + GAP_S + LATE_S
        assert begins[0, 2] >= max(ends[0, 1], ends[1, 0]) - 1e-4 and begins[1, 0] >= ends[0, 0] - 1e-4
    order = sorted(range(4), key=lambda number: float(calls["enqueued_s"][calls["session"] == number].min()))
    for before, after in pairwise(order):
        last_s = (calls["enqueued_s"] + calls["e2e_s"])[calls["session"] == before].max()
        assert calls["enqueued_s"][calls["session"] == after].min() >= last_s - 1e-4, "a pool of one runs one session at a time"


def test_a_refused_call_ends_its_session_and_all_calls_are_counted(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway(refuse={0: 429}).serving() as gateway:
        printed = document(capsys, "run", "--url", gateway.url, "--trace", trace)
    assert (printed["metrics"]["calls_shed"], printed["metrics"]["calls_completed"], printed["metrics"]["sessions_completed"]) == (4, 12, 3)


def test_a_gateway_that_goes_away_leaves_failed_calls(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway(answers=6).serving() as gateway:
        printed = document(capsys, "run", "--url", gateway.url, "--trace", trace)
    metrics = printed["metrics"]
    assert metrics["calls_completed"] == 6 and metrics["calls_failed"] > 0
    assert metrics["calls_completed"] + metrics["calls_failed"] + metrics["calls_shed"] == 16


def test_a_gateway_that_fails_is_one_line_and_exit_1(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway(broken=True).serving() as gateway:
        assert run_command(["run", "--url", gateway.url, "--trace", trace]) == 1
    assert "/v1/completions answers 502: no engine" in capsys.readouterr().err.splitlines()[-1]


def test_a_call_that_the_gateway_never_reports_is_an_error(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("talaria.gpu.run.execute.SETTLE_S", 2.0)
    with FakeGateway(loses_row_after=1).serving() as gateway:
        assert run_command(["run", "--url", gateway.url, "--trace", trace]) == 1
    assert "16 calls sent, 15 reported by both sides, 1 by the client alone" in capsys.readouterr().err


def test_several_policies_are_reset_in_turn_and_compared(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway().serving() as gateway:
        printed = document(
            capsys, "run", "--url", gateway.url, "--trace", trace, "--configs", "talaria,no-sp,round-robin", "--seeds", "2", "--out", "runs"
        )
    assert set(printed["configs"]) == {"talaria", "no-sp", "round-robin"} and Path("runs/compare.json").exists()
    asked = [(reset["router"], reset["session_prefill"]) for reset in gateway.resets]
    assert asked == [("full", True), ("full", False), ("round-robin", True)] * 2
    assert [record.seed for record in read_run("runs/no-sp")[1]] == [0, 1]


def test_a_later_result_replaces_an_earlier_one_whole(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one policy or of several: no file of the earlier one stays beside those of the later."""
    with FakeGateway().serving() as gateway:
        command = ["run", "--url", gateway.url, "--trace", trace, "--out", "runs"]
        document(capsys, *command)
        document(capsys, *command, "--configs", "talaria,no-sp")
        compared = {path.name for path in Path("runs").iterdir()}
        assert compared == {"talaria", "no-sp", "compare.json", "compare.png", "latency.png", "switches.png"}
        document(capsys, *command, "--configs", "round-robin,no-sp")
        assert {path.name for path in Path("runs").iterdir()} == compared - {"talaria"} | {"round-robin"}
        Path("runs/no-sp/thesis.txt").write_text("")
        assert run_command([*command, "--configs", "talaria,no-sp"]) == 2, "a file in it is somebody's"
        Path("runs/no-sp/thesis.txt").unlink()
        document(capsys, *command)
    assert Path("runs/run.json").exists() and not any(path.is_dir() for path in Path("runs").iterdir())


def test_an_output_that_holds_somebodys_files_is_refused_before_anything_is_sent(
    trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("")
    with FakeGateway().serving() as gateway:
        assert run_command(["run", "--url", gateway.url, "--trace", trace, "--out", "mine"]) == 2
    assert "'thesis.txt', which is no earlier output" in capsys.readouterr().err and gateway.prompts == []


def test_a_broken_run_goes_on_where_it_broke(trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", "--trace", trace, "--configs", "talaria,no-sp", "--out", "runs"]
    monkeypatch.setattr("talaria.gpu.run.execute.SETTLE_S", 2.0)
    with FakeGateway(loses_row_after=2).serving() as gateway:
        assert run_command([*command, "--url", gateway.url]) == 1
    assert Path(".runs.resume").exists()
    with FakeGateway().serving() as gateway:
        assert run_command([*command, "--url", gateway.url, "--resume", "--set", "tau=4"]) == 2
        written = Path(trace).read_bytes()
        Path(trace).write_bytes(written.replace(b'"s3"', b'"s4"'))
        assert run_command([*command, "--url", gateway.url, "--resume"]) == 2
        assert "of another trace or of other options" in capsys.readouterr().err
        Path(trace).write_bytes(written)
        printed = document(capsys, *command, "--url", gateway.url, "--resume")
        assert [reset["session_prefill"] for reset in gateway.resets] == [False], "only what had not been finished runs"
    assert set(printed["configs"]) == {"talaria", "no-sp"} and not Path(".runs.resume").exists()


def test_a_run_against_itself_validates(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway().serving() as gateway:
        document(capsys, "run", "--url", gateway.url, "--trace", trace, "--out", "run", "--seeds", "2")
    printed = document(capsys, "validate", "run", "run", "--out", "validation")
    assert printed["passed"] and printed["calls"]["ttft_s"]["mae_s"] == 0 and printed["calls"]["e2e_s"]["count"] == 16
    assert printed["decisions"]["differences"] == 0
    assert {path.name for path in Path("validation").iterdir()} == {"validation.json", "calls.parquet", "validation.png"}


BAD_USAGE = [
    (["swerve"], ["'swerve'", "did you mean 'serve'"]),
    (["run"], ["talaria-gpu run", "exactly one of CLUSTER and --url URL"]),
    (["run", "--url", "http://127.0.0.1:1"], ["there is nothing to replay", "--trace FILE"]),
    (["run", "c.yaml", "--url", "http://127.0.0.1:1"], ["exactly one of CLUSTER and --url URL"]),
    (["run", "--url", "localhost:1", "--trace", "trace.jsonl"], ["--url", "'localhost:1'", "http://HOST:PORT"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "trace.jsonl"], ["http://127.0.0.1:1/v1/models", "is the gateway up?"]),
    (["run", "absent.yaml", "--trace", "trace.jsonl"], ["absent.yaml", "No such file"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "t", "--resume"], ["--resume", "--out DIR"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "t", "--gap-cap", "-1"], ["--gap-cap", "0 for no cap"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "t", "--gap-cap", "nan"], ["--gap-cap", "0 for no cap"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "t", "--configs", "talaria,no-hkvr"], ["--configs", "are the same"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "t", "--config", "talarai"], ["--config", "did you mean 'talaria'"]),
    (["run", "--url", "http://127.0.0.1:1", "--trace", "t", "--set", "taw=1"], ["--set", "did you mean 'tau'"]),
    (["validate", "run"], ["talaria-gpu validate", "GPU_RUN"]),
    (["validate", "absent", "absent"], ["absent", "is no directory"]),
    (["doctor"], ["talaria-gpu doctor", "CLUSTER"]),
    (["doctor", "absent.yaml"], ["absent.yaml", "No such file"]),
    (["serve"], ["talaria-gpu serve", "CLUSTER"]),
    (["serve", "absent.yaml"], ["absent.yaml", "No such file"]),
    (["profile", "absent.yaml", "-o", "x.json"], ["absent.yaml", "No such file"]),
]


def test_a_key_that_no_header_can_show_is_refused_and_not_repeated(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALARIA_KEY", "secret\n")
    assert run_command(["run", "--url", "http://127.0.0.1:1", "--trace", trace]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: TALARIA_KEY: ") and "secret" not in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize(("arguments", "parts"), BAD_USAGE, ids=[" ".join(arguments) for arguments, _ in BAD_USAGE])
def test_bad_usage_is_one_line_and_exit_2(
    arguments: list[str], parts: list[str], trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, printed = run_command(arguments), capsys.readouterr()
    lines = printed.err.splitlines()
    assert (code, printed.out, len(lines)) == (2, "", 1), printed.err
    assert [part for part in parts if part not in lines[0]] == [], lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"], "bad usage leaves nothing behind"


def test_a_trace_that_its_model_cannot_take_is_refused_before_anything_runs(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway(context_tokens=450).serving() as gateway:
        assert run_command(["run", "--url", gateway.url, "--trace", trace]) == 2
    assert "a call of 500 + 4 tokens on big; allowed: at most 450" in capsys.readouterr().err and gateway.prompts == []
