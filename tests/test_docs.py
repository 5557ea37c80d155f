"""What the documentation shows is what the program takes: examples load, tables name everything, commands exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from talaria.cli import policyfile
from talaria.cli.gpu import COMMANDS as GPU_COMMANDS
from talaria.cli.gpu import run_command as run_gpu
from talaria.cli.main import COMMANDS, run_command
from talaria.gpu import config as cluster
from talaria.profiles import names as profile_names
from talaria.sim import config, scenario
from talaria.sim.run import plan
from talaria.sim.scenario import InstanceGroup, Scenario
from talaria.workload.importers import FORMATS
from talaria.workload.trace import TraceFile
from tests.conftest import REPOSITORY

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def block(name: str, language: str) -> str:
    """The first fenced block of ``language`` on a page."""
    found = re.search(rf"```{language}\n(.*?)```", page(name), re.DOTALL)
    assert found is not None
    return found.group(1)


def first_cells(name: str) -> str:
    """The first column of all tables of a page."""
    return "\n".join(line.split("|")[1] for line in page(name).splitlines() if line.startswith("|"))


def test_the_scenario_shown_can_be_run(tmp_path: Path) -> None:
    path = tmp_path / "two-groups.yaml"
    path.write_text(block("scenarios.md", "yaml"), encoding="utf-8")
    planned = plan(scenario.load(str(path)), config.get("talaria"))
    assert [item.capabilities.hot for item in planned.instances] == [False, True]


def test_every_field_of_a_scenario_is_described() -> None:
    said = page("scenarios.md")
    fields = [info.alias or name for model in (Scenario, InstanceGroup) for name, info in model.model_fields.items()]
    assert [name for name in fields if not re.search(rf"\b{name}\b", said)] == []


CLUSTER_MODELS = (
    cluster.ClusterConfig, cluster.Gateway, cluster.Key, cluster.Limits, cluster.Model, cluster.Instance, cluster.Arena, cluster.Engine,
    cluster.Policy,
)  # fmt: skip


def test_every_field_of_a_cluster_is_described() -> None:
    said = page("gpu.md")
    fields = [info.alias or name for model in CLUSTER_MODELS for name, info in model.model_fields.items()]
    assert [name for name in fields if not re.search(rf"\b{name}\b", said)] == []


def test_the_clusters_shown_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(block("gpu.md", "yaml"), encoding="utf-8")
    assert list(cluster.load(path).models) == ["big", "other"]
    examples = sorted((REPOSITORY / "examples").glob("cluster-*.yaml"))
    names = ["cpu-pair", "tp8-two-models-arena", "tp8-three-models", "two-hosts"]
    assert [cluster.load(example).name for example in examples] == names
    assert [example.name for example in examples if f"(../examples/{example.name})" not in page("gpu.md")] == []
    assert block("hardware.md", "yaml") in examples[2].read_text(encoding="utf-8"), "the page shows what the example holds"


def test_the_trace_shown_is_valid(tmp_path: Path) -> None:
    text, at, values = block("traces.md", "json"), 0, []
    while at < len(text.rstrip()):
        value, at = json.JSONDecoder().raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
        values.append(value)
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    (session,) = TraceFile(path).sessions()
    assert [call.line for call in session.calls] == ["main", "a1", "main"]


def test_the_small_trace_suits_the_cluster_without_gpus() -> None:
    served = cluster.load(REPOSITORY / "examples" / "cluster-cpu.yaml")
    sessions = list(TraceFile(REPOSITORY / "examples" / "small-agents.jsonl").sessions())
    calls = [call for session in sessions for call in session.calls]
    assert len(sessions) == 8 and {call.model for call in calls} == set(served.models)
    assert max(call.prompt_tokens + call.output_tokens for call in calls) < 2048


def test_every_trace_format_is_listed() -> None:
    assert set(re.findall(r"`([a-z0-9-]+)`", first_cells("traces.md"))) == set(FORMATS)
    assert f"[{len(FORMATS)} formats]" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_points_shown_can_be_fitted(tmp_path: Path) -> None:
    points, profile = tmp_path / "points.json", tmp_path / "our-b200.json"
    points.write_text(block("profiles.md", "json"), encoding="utf-8")
    assert run_command(["profile", "fit", str(points), "-o", str(profile)]) == 0
    assert run_command(["profile", "check", str(profile)]) == 0


def test_the_policy_file_shown_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(block("knobs.md", "yaml"), encoding="utf-8")
    assert policyfile.load(path) == policyfile.Policy({"tau": 2.0, "nu": 20.0}, "talaria")


def test_every_shipped_profile_is_listed() -> None:
    assert set(profile_names()) <= set(re.findall(r"`([a-z0-9-]+)`", first_cells("profiles.md")))


def commands_shown(program: str = "talaria-sim") -> list[list[str]]:
    """Every command line of ``program`` on every page, as words."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = re.findall(rf"^\$ {program} (.*)$", text, re.MULTILINE) + re.findall(rf"`{program} ([^`]*)`", text)
    shown += re.findall(rf"^{program} (.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in sorted(set(shown))]


@pytest.mark.parametrize("words", commands_shown(), ids=" ".join)
def test_a_command_shown_exists_with_its_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = words[:2] if words[0] in ("trace", "profile") else words[:1]
    assert words[0] in COMMANDS and run_command([*command, "--help"]) == 0
    known = capsys.readouterr().out
    assert [word for word in words if word.startswith("-") and not re.search(rf"(^|\s){word}\b", known)] == []


@pytest.mark.parametrize("words", commands_shown("talaria-gpu"), ids=" ".join)
def test_a_gpu_command_shown_exists_with_its_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] in GPU_COMMANDS and run_gpu([words[0], "--help"]) == 0
    known = capsys.readouterr().out
    assert [word for word in words if word.startswith("-") and not re.search(rf"(^|\s){word}\b", known)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_page_and_picture_that_is_linked_exists(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_nothing_is_left_to_be_filled_in(path: Path) -> None:
    assert re.findall(r"@@\w*", path.read_text(encoding="utf-8")) == []
