"""``reproduce`` as a script would use it, on workloads cut to a few sessions: what it prints does not depend on their size."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from talaria.cli.main import run_command
from talaria.profiles import load as load_profile
from talaria.reproduce import experiments, targets
from talaria.sim.run import simulate
from talaria.sim.scenario import Scenario, load


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every scenario with its first three sessions, in this process."""

    def cut(name: str) -> Scenario:
        whole = load(name)
        return whole.model_copy(update={"workload": {**whole.workload, "first_sessions": 3}})

    monkeypatch.setattr(experiments.scenarios, "load", cut)
    monkeypatch.setattr("talaria.sim.parallel.WORTH_WORKERS_S", math.inf)
    monkeypatch.chdir(tmp_path)


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert run_command(["reproduce", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("small")
def test_every_published_number_is_printed_with_mean_spread_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "--seeds", "4:6")
    assert (printed["schema"], printed["seeds"], printed["source"]) == ("talaria.reproduce/1", [4, 5], targets.load().source)
    assert len(printed["numbers"]) == len(list(targets.load().targets()))
    for row in printed["numbers"]:
        if row["kind"] == "result" and row["simulated"] is not None and row["published"]:
            assert row["error"] == pytest.approx(row["simulated"] / row["published"] - 1, rel=1e-6, abs=1e-6)
        else:
            assert row["error"] is None
    by_name = {(row["group"], row["name"]): row for row in printed["numbers"]}
    assert by_name["tp8", "talaria/sct_p50_s"]["ci95"][0] < by_name["tp8", "talaria/sct_p50_s"]["simulated"]
    assert by_name["tp8", "gpus"]["simulated"] == 8 and by_name["tau", "taus_s"]["simulated"] == [0, 0.5, 1, 2, 5]
    recompute_s = load_profile("paper-tp8").timing("Qwen3-235B").prefill_s(0, 0, 25_000)
    assert by_name["recompute", "25000"]["simulated"] == pytest.approx(recompute_s, rel=1e-6)
    switch = by_name["switch", "logical_ms/h2d_only/p50"]
    assert switch["unit"] == "ms" and 100 < switch["simulated"] < 10_000


@pytest.mark.usefixtures("small")
def test_the_page_on_screen_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["reproduce", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for _, target in targets.load().targets():
        assert any(line.startswith(f" {target.at} ") for line in lines), target.at
    for wanted in ("Published figures disagree", "absolute relative error", "talaria ≤ 1.03", "speed-up", "at least 28 of 30"):
        assert wanted in printed
    assert max(map(len, lines)) <= 100


@pytest.mark.usefixtures("small")
def test_an_output_directory_has_the_document_and_a_page_with_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "--seeds", "1", "--out", "out")
    assert {path.name for path in Path("out").iterdir()} == {"reproduce.json", "report.html"}
    assert {**json.loads(Path("out/reproduce.json").read_text()), "host": printed["host"]} == printed
    page = Path("out/report.html").read_text()
    titles = re.findall(r'<img src="data:image/svg\+xml;base64,[^"]+" alt="([^:]+):', page)
    assert titles == [
        "Regime", "Latency", "Sessions", "Session-prefill", "Switches", "Rounds", "Rounds of talaria", "Rounds of round-only", "Memory",
        "Placement", "Opens", "Lease timeout",
    ]  # fmt: skip
    assert re.findall(r'(?:src|href)="(?!data:)', page) == [] and "<script" not in page
    assert all(f"<td>{target.at}</td>" in page for _, target in targets.load().targets())


@pytest.mark.usefixtures("small")
def test_the_same_seeds_write_the_same_document_over_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.reproduce.page.render", lambda *_: "")
    assert run_command(["reproduce", "--seeds", "1", "--out", "out"]) == 0
    first = Path("out/reproduce.json").read_bytes()
    assert run_command(["reproduce", "--seeds", "1", "--out", "out"]) == 0
    assert Path("out/reproduce.json").read_bytes() == first


@pytest.mark.usefixtures("small")
def test_an_interrupt_shows_the_seeds_that_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = iter(range(1, 1000))

    def interruptible(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == len(experiments.EXPERIMENTS) + 2:
            raise KeyboardInterrupt
        return simulate(*arguments, **keywords)

    monkeypatch.setattr(experiments, "simulate", interruptible)
    assert document(capsys, "--seeds", "3", code=130)["seeds"] == [0]


@pytest.mark.usefixtures("small")
def test_an_interrupt_before_a_seed_is_whole_leaves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "simulate", interrupted)
    assert run_command(["reproduce", "--seeds", "1", "--out", "out"]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err, list(Path().iterdir())) == ("", "interrupted after 0 of 1 seeds\n", [])


BAD = [
    (["--seeds", "0"], ["--seeds", "'0'", "allowed: 1 to"]),
    (["--seeds", "ten"], ["--seeds", "'ten'", "allowed: N (0..N-1) or A:B"]),
    (["--seed", "1"], ["'--seed'", "did you mean '--seeds'"]),
    (["--out", "taken"], ["taken", "'mine.txt'", "choose another --out"]),
    (["--out", "taken/mine.txt"], ["mine.txt", "no directory", "choose another --out"]),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_before_anything_runs(
    arguments: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/mine.txt").write_text("mine")
    monkeypatch.setattr(experiments, "simulate", lambda *_: pytest.fail("nothing may run"))
    assert run_command(["reproduce", *arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith("error: ") and all(word in line for word in said)
