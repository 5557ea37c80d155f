"""Scenario files: what is wrong with one is a single line that names the file, the field, what is allowed and the nearest name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from talaria.errors import InputError
from talaria.profiles.load import DATA, read_json
from talaria.sim import config, scenario
from talaria.sim.run import plan

GOOD = {
    "schema": "talaria.scenario/1",
    "name": "mine",
    "about": "one server",
    "profile": "paper-tp8",
    "models": ["Qwen3-235B", "GLM5-nvfp4"],
    "instances": [{"count": 1}],
    "workload": {"preset": "quickstart", "models": ["Qwen3-235B", "GLM5-nvfp4"]},
}


def loaded(tmp_path: Path, text: str) -> scenario.Scenario:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return scenario.load(str(path))


def complaint(tmp_path: Path, **changes: object) -> str:
    """The error of a scenario with these fields changed, read and resolved."""
    with pytest.raises(InputError) as caught:
        plan(loaded(tmp_path, yaml.safe_dump(GOOD | changes)), config.get("talaria"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", scenario.names())
def test_every_shipped_scenario_resolves(name: str) -> None:
    assert plan(scenario.load(name), config.get("talaria")).instances


BAD_FIELDS = [
    ({"nme": "x"}, ["mine.yaml", "'nme'", "did you mean 'name'"]),
    ({"instances": [{"cuont": 2}]}, ["mine.yaml", "instances[0].cuont", "did you mean 'count'"]),
    ({"instances": [{"count": 0}]}, ["mine.yaml", "instances[0].count = 0", "greater than or equal to 1"]),
    ({"instances": [{"count": True}]}, ["instances[0].count = True", "integer"]),
    ({"instances": []}, ["mine.yaml", "instances = []", "allowed: at least 1 item"]),
    ({"instances": 3}, ["mine.yaml", "instances = 3", "allowed: a list"]),
    ({"workload": []}, ["mine.yaml", "workload = []", "allowed: an object"]),
    ({"name": ""}, ["mine.yaml", "name = ''", "allowed: at least 1 character"]),
    ({"instances": [{"models": []}]}, ["mine.yaml", "instances[0].models = []"]),
    ({"instances": [{"models": ["GLM5"]}]}, ["mine.yaml: instances[0].models", "'GLM5'", "did you mean 'GLM5-nvfp4'"]),
    ({"instances": [{"opened": ["GLM5"]}]}, ["mine.yaml: instances[0].opened", "'GLM5'", "did you mean 'GLM5-nvfp4'"]),
    ({"instances": [{"models": ["Qwen3-235B"], "opened": ["GLM5-nvfp4"]}]}, ["instances[0].opened", "'GLM5-nvfp4'", "allowed: Qwen3-235B"]),
    ({"models": ["Qwen3-235B", "Qwen3-235B"]}, ["mine.yaml: models", "'Qwen3-235B' is given twice"]),
    ({"models": ["Qwen3-32B"]}, ["unknown model 'Qwen3-32B'", "allowed: "]),
    ({"profile": "paper-tp9"}, ["scenario mine: profile", "'paper-tp9'", "did you mean 'paper-tp"]),
    ({"arrivals": "poison:1"}, ["scenario mine: arrivals", "'poison'", "did you mean 'poisson'"]),
    ({"workload": {"preset": "quikstart"}}, ["scenario mine: workload", "'quikstart'", "did you mean 'quickstart'"]),
    ({"workload": {"preset": "quickstart", "first_sessions": 0}}, ["scenario mine: workload", "first_sessions = 0", "at least 1"]),
    ({"gap_cap_s": float("inf")}, ["mine.yaml", "gap_cap_s = inf", "finite"]),
    ({"open_s": float("nan")}, ["mine.yaml", "open_s = nan"]),
    ({"warmup_s": -1}, ["mine.yaml", "warmup_s = -1", "greater than or equal to 0"]),
    ({"telemetry": {"heartbeat_s": 0}}, ["mine.yaml", "telemetry.heartbeat_s = 0", "0.01"]),
    ({"belief_error": {"decode": 11}}, ["mine.yaml", "belief_error.decode = 11", "10"]),
]


@pytest.mark.parametrize(("changes", "parts"), BAD_FIELDS, ids=[str(changes) for changes, _ in BAD_FIELDS])
def test_a_wrong_field_is_one_line_with_its_place(tmp_path: Path, changes: dict[str, object], parts: list[str]) -> None:
    line = complaint(tmp_path, **changes)
    assert [part for part in parts if part not in line] == [], line


def test_a_model_that_no_instance_runs_is_refused_before_anything_runs(tmp_path: Path) -> None:
    line = complaint(tmp_path, instances=[{"pool": "hot", "models": ["Qwen3-235B"]}])
    assert "no instance runs model 'GLM5-nvfp4'" in line and "allowed: Qwen3-235B" in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["mine.yaml: is empty", "schema"]),
        ("- a\n", ["mine.yaml: is a list"]),
        ("name: [\n", ["mine.yaml:2: is no YAML"]),
        ("name: a\nname: b\n", ["mine.yaml:2", "'name' is given twice"]),
        ("3: x\n", ["mine.yaml: 3 is no name"]),
        ("[" * 1000, ["mine.yaml: is nested too deeply"]),
        ("? [a, b]\n: c\n", ["mine.yaml"]),
    ],
)
def test_a_file_that_is_no_mapping_is_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        loaded(tmp_path, text)
    assert [part for part in parts if part not in str(caught.value)] == [] and "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_with_its_residue_is_one_line(tmp_path: Path) -> None:
    profile = read_json(DATA / "paper-tp8.json")
    profile["hardware"]["residue_bytes"]["value"] = 2**50
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile), encoding="utf-8")
    said = complaint(tmp_path, profile=str(path))
    assert "with the residue of parked models, the device cap is" in said and said.endswith("use a larger GPU group")
