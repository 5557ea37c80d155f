"""The whole of it over stub engines: ``run`` serves a cluster of its own, replays, and its decisions replay to zero differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from talaria.cli.gpu import run_command
from talaria.report.files import read_run
from talaria.report.replay import replay
from talaria.workload.rules import TraceHeader
from talaria.workload.trace import write_trace
from tests.gpu.cluster import stub_document
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
    print(printed.err)
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
    assert printed["configs"]["talaria"]["metrics"]["kv_device"] > 0.5, "returns find their prefix on the device"
