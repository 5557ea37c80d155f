"""The whole of it over stub engines: ``run`` serves a cluster of its own, replays, and its decisions replay to zero differences."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from talaria.cli.gpu import run_command
from talaria.policy.codec import CODEC
from talaria.report.declog import read_log
from talaria.report.files import read_run
from talaria.report.replay import replay
from talaria.workload.rules import TraceHeader
from talaria.workload.trace import write_trace
from tests.gpu.cluster import stub_document, wait_for
from tests.gpu.run.test_run import sessions

TWO = ({"name": "g0", "models": ["m0", "m1"]}, {"name": "g1", "models": ["m1", "m0"]})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_trace("trace.jsonl", TraceHeader("small"), sessions(8))
    Path("cluster.yaml").write_text(yaml.safe_dump(stub_document(tmp_path, TWO, engine={"start_timeout_s": 30.0})))
    return "cluster.yaml"


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    got = run_command([*arguments, "--json"])
    printed = capsys.readouterr()
    assert got == code, printed.err + printed.out
    return json.loads(printed.out)


def test_a_served_cluster_replays_a_trace(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "run", cluster, "--trace", "trace.jsonl", "--out", "run", "--configs", "talaria,least-pressure")
    for config in ("talaria", "least-pressure"):
        metrics = printed["configs"][config]["metrics"]
        assert (metrics["calls_completed"], metrics["sessions_completed"], metrics["calls_failed"]) == (32, 8, 0)
        _, (record,) = read_run(Path("run", config))
        assert set(record.calls["output_tokens"].tolist()) == {8, 6, 5, 4} and (record.calls["prompt_tokens"] > 0).all()
        found = replay(Path("run", config, "decisions.jsonl"))
        assert (found.count, found.first) == (0, []) and found.decisions > 100
        placed = [record for _, record in read_log(Path("run", config, "decisions.jsonl")) if record.get("do") == "place"]
        told = {CODEC.decode(record["args"])[0].expected_output_tokens for record in placed}
        assert told == {8, 6, 5, 4}, "policies know what is forced, as in the simulator"
    assert printed["configs"]["talaria"]["metrics"]["kv_device"] > 0.5, "returns find their prefix on the device"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_run_that_is_ended_leaves_nothing_that_it_started(cluster: str, tmp_path: Path, number: int, code: int) -> None:
    began = [process for process in processes_in(tmp_path) if process != os.getpid()]
    endless = [replace(session, calls=(replace(session.calls[0], output_tokens=100_000),)) for session in sessions(2)]
    write_trace("long.jsonl", TraceHeader("long"), endless)
    command = [sys.executable, "-m", "talaria.cli.gpu", "run", cluster, "--trace", "long.jsonl", "--out", "run"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds_interrupts) as run:
        assert run.stderr is not None
        wait_for("calls are sent", lambda: "gaps are capped" in (run.stderr.readline() or "") if run.stderr else False, 60.0)
        wait_for("the gateway has calls", lambda: Path("logs/gateway.log").exists(), 30.0)
        run.send_signal(number)
        assert run.wait(100) == code
    wait_for("nothing is left", lambda: [process for process in processes_in(tmp_path) if process not in [*began, os.getpid()]] == [], 30.0)
    assert Path(".run.resume").exists() and not Path("run").exists()


def heeds_interrupts() -> None:
    """A shell starts what it runs in the background with interrupts ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_in(directory: Path) -> list[int]:
    """Those whose working directory it is."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "cwd").readlink() == directory:
                found.append(int(entry.name))
    return found
