"""``talaria-gpu doctor`` says what would fail on a machine, and how to mend it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from talaria.cli.gpu import run_command
from talaria.gpu import config
from talaria.gpu.doctor.checks import GIB, Machine, examine
from talaria.gpu.doctor.engine import EngineFacts
from talaria.gpu.doctor.machine import Gpu, parse
from talaria.gpu.modelfiles import read

ENGINE = EngineFacts("0.5.23", "0.5.23", ("qwen25", "glm45"), ("qwen3", "glm45"))
GPUS = [Gpu(number, "NVIDIA B200", 183 * GIB, 0, "580.82") for number in range(8)]

ARENA = {"managed_gib": 100.0}
GROUP = {"name": "group0", "gpus": list(range(8)), "tp": 8, "models": ["big", "other"]}


def model(directory: Path, name: str, weights_gib: float, layers: int = 94, kv_heads: int = 4, **fields: Any) -> dict[str, Any]:
    """A model folder whose sparse weight file has that size."""
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": kv_heads, "head_dim": 128, "dtype": "bfloat16",
        "max_position_embeddings": 131_072,
    }))  # fmt: skip
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(int(weights_gib * GIB))
    return {"path": str(path), "kv_tokens": 400_000, **fields}


def document(directory: Path, **changes: Any) -> dict[str, Any]:
    models = {"big": model(directory, "big", 438.0, tool_parser="qwen25"), "other": model(directory, "other", 380.0)}
    return {
        "schema": "talaria.cluster/1", "name": "one", "gateway": {"port": 0, "admin_key": {"env": "ADMIN_KEY_OF_TEST"}}, "models": models,
        "instances": [GROUP], **changes,
    }  # fmt: skip


def findings(value: dict[str, Any], **machine: Any) -> dict[str, list[tuple[str, str, str]]]:
    made = Machine(**{"gpus": GPUS, "memory_bytes": 2000 * GIB, "open_files": 1 << 20, "engine": ENGINE, **machine})
    found: dict[str, list[tuple[str, str, str]]] = {}
    for each in examine(config.check(value, "cluster"), made):
        found.setdefault(each.check, []).append((each.level, each.what, each.fix))
    return found


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY_OF_TEST", "secret")


def test_a_machine_with_everything_has_nothing_that_fails(tmp_path: Path) -> None:
    found = findings(document(tmp_path))
    assert [finding for check in found.values() for finding in check if finding[0] == "fail"] == []
    (_, fits), *_ = [(level, what) for level, what, _ in found["instance group0"] if "tokens of KV" in what]
    assert "54.8 of 183.0 GiB a GPU" in fits and "beside 1 idle models" in fits
    assert "818.0 GiB of weight images in 2000.0 GiB" in found["host memory"][0][1]


@pytest.mark.parametrize(
    ("changes", "machine", "check", "what", "fix"),
    [
        ({}, {"engine": EngineFacts(error="No module named 'sglang'")}, "engine", "No module named 'sglang'", "pip install"),
        ({}, {"gpus": GPUS[:4]}, "instance group0", "no GPU 4", "has 0, 1, 2, 3"),
        ({}, {"gpus": []}, "instance group0", "no GPU 0", "the driver"),
        ({}, {"gpus": [gpu._replace(memory_bytes=60 * GIB) for gpu in GPUS]}, "instance group0", "leaves", "use more GPUs"),
        ({}, {"memory_bytes": 512 * GIB}, "host memory", "in 512.0 GiB", "add memory"),
        ({"instances": [{**GROUP, "host_kv_gib": 1500}]}, {}, "host memory", "GiB of KV (instances[].host_kv_gib) in", "lower host_kv_gib"),
        ({"instances": [{**GROUP, "gpus": [], "arena": {"managed_gib": 150}}]}, {}, "host memory", "1200.0 GiB of arenas", "serve fewer"),
        ({"instances": [{**GROUP, "arena": ARENA}]}, {"open_files": 52_223}, "instance group0", "to 52,224, and 52,223 are", "-Hn 52224"),
        ({"policy": {"knobs": {"sticky_start": "nowhere"}}}, {}, "knobs", "sticky_start=nowhere; allowed: pressure, cost", "policy.knobs"),
        ({"policy": {"file": "./absent.yaml"}}, {}, "knobs", "absent.yaml", "policy.file"),
        ({"policy": {"profile": "h200"}}, {}, "profile", "unknown model 'big'", "profile_model"),
        ({"policy": {"profile": "./absent.json"}}, {}, "profile", "absent.json", ""),
    ],
    ids=["sglang", "gpu", "driver", "hbm", "ram", "kv", "arenas", "files", "knobs", "policy", "profile-model", "profile"],
)
def test_what_would_fail_is_said_with_how_to_mend_it(
    tmp_path: Path, changes: dict[str, Any], machine: dict[str, Any], check: str, what: str, fix: str
) -> None:
    found = [finding for finding in findings(document(tmp_path, **changes), **machine)[check] if finding[0] == "fail"]
    assert len(found) == 1 and what in found[0][1] and fix in found[0][2], found


def test_models_parsers_keys_and_ports_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADMIN_KEY_OF_TEST")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        value = document(tmp_path)
        value["gateway"]["port"] = taken.getsockname()[1]
        value["models"]["big"]["tool_parser"] = "qwen99"
        value["models"]["other"]["path"] = str(tmp_path / "absent")
        found = findings(value)
    failed = {check: [what for level, what, _ in each if level == "fail"] for check, each in found.items()}
    assert "'qwen99' is unknown" in failed["model big"][0] and "cannot be read" in failed["model other"][0]
    assert "ADMIN_KEY_OF_TEST is not set" in failed["gateway.admin_key"][0] and "cannot be listened on" in failed["gateway"][0]


@pytest.mark.parametrize(
    "text", ["", "\xff", "[]", "{", '{"text_config": 3}', '{"num_hidden_layers": "many"}', '{"num_attention_heads": 0}', "[" * 100_000]
)
def test_a_config_that_describes_no_model_is_a_finding(tmp_path: Path, text: str) -> None:
    value = document(tmp_path)
    (tmp_path / "big" / "config.json").write_text(text, encoding="latin-1")
    ((level, what, fix),) = findings(value)["model big"]
    assert level == "fail" and "config.json" in what and "downloaded model" in fix


def test_weights_in_an_older_format_beside_the_newer_do_not_count_twice(tmp_path: Path) -> None:
    value = document(tmp_path)
    with (tmp_path / "big" / "pytorch_model.bin").open("wb") as file:
        file.truncate(500 * GIB)
    assert "438.0 GiB of weights" in findings(value)["model big"][0][1]


@pytest.mark.parametrize(("tokens", "what"), [(400_000, None), (100_000_000, "kv_tokens = 100,000,000"), (None, "does not say kv_tokens")])
def test_a_pool_that_does_not_fit_or_is_not_stated_is_worth_a_warning(tmp_path: Path, tokens: int | None, what: str | None) -> None:
    value = document(tmp_path)
    value["models"]["other"]["kv_tokens"] = tokens
    warned = [text for level, text, _ in findings(value)["instance group0"] if level == "warn"]
    assert len(warned) == (what is not None) and all(what in text and "other" in text for text in warned if what)


@pytest.mark.parametrize(
    ("gib", "level", "what"),
    [
        (0.01, "fail", "host_kv_gib keeps 10.2 MiB of KV, less than one page of big (64 tokens, 2.9 MiB a rank)"),
        (0.1, "ok", "host_kv_gib keeps 102.4 MiB of KV: about 256 tokens"),
        (500.0, "ok", "host_kv_gib keeps 500.0 GiB of KV: about 1,365,312 tokens"),
    ],
)
def test_how_much_a_host_pool_keeps_is_said_and_less_than_a_page_fails(tmp_path: Path, gib: float, level: str, what: str) -> None:
    found = findings(document(tmp_path, instances=[{**GROUP, "host_kv_gib": gib}]))
    ((said, text, _),) = [finding for finding in found["instance group0"] if "host_kv_gib keeps" in finding[1]]
    assert said == level and what in text
    memory = found["host memory"][0][1]
    assert " 0.0 " not in memory and memory.endswith("for the system")


def test_a_host_pool_for_models_that_it_cannot_keep_is_worth_a_warning(tmp_path: Path) -> None:
    value = document(tmp_path, instances=[{**GROUP, "host_kv_gib": 10.0}])
    for name in value["models"]:
        value["models"][name]["family"] = "recurrent"
    assert [text for level, text, _ in findings(value)["instance group0"] if level == "warn" and "none of its models" in text]


def test_weights_are_kept_on_the_host_of_models_that_switch_and_of_an_arena(tmp_path: Path) -> None:
    value = document(tmp_path)
    for fields, images in (({}, "0.0 KiB"), ({"arena": ARENA}, "438.0 GiB"), ({"models": ["big", "other"]}, "818.0 GiB")):
        value["instances"] = [{**GROUP, "models": ["big"], **fields}]
        assert findings(value)["host memory"][0][1].startswith(f"{images} of weight images"), fields


def test_an_arena_that_fits_says_how_many_files_it_takes(tmp_path: Path) -> None:
    found = findings(document(tmp_path, instances=[{**GROUP, "arena": ARENA}]), open_files=52_224)["instance group0"]
    ((level, text, _),) = [finding for finding in found if "chunks" in finding[1]]
    assert level == "ok" and "8 × 6,400 chunks" in text and "up to 52,224, as allowed" in text


@pytest.mark.parametrize(
    ("gib", "kv_tokens", "on_gpus", "levels", "what"),
    [
        (115.0, 400_000, True, [], ""),
        (120.0, 400_000, True, ["warn"], "120.0 GiB a rank, 10.2 GiB of each of 1 idle models, and 54.8 GiB of weights while a model"),
        (160.0, 400_000, True, ["fail"], "160.0 GiB a rank, 10.2 GiB of each of 1 idle models, and"),
        (60.0, 100_000, True, ["warn"], "54.8 GiB of weights, 20.6 GiB of KV and 0.1 GiB of table for 256 requests of big a rank"),
        (100.0, 3_000_000, True, ["warn"], "47.5 GiB of weights, 135.1 GiB of KV and 0.1 GiB of table for 256 requests of other a rank"),
        (200.0, 400_000, False, ["warn"], "200.0 GiB a rank, and 54.8 GiB of weights while a model loads, in 250.0 GiB"),
        (251.0, 400_000, False, ["fail"], "in 250.0 GiB"),
    ],
)
def test_an_arena_has_to_fit_the_device_and_its_models_the_arena(
    tmp_path: Path, gib: float, kv_tokens: int, on_gpus: bool, levels: list[str], what: str
) -> None:
    value = document(tmp_path, instances=[{**GROUP, "gpus": GROUP["gpus"] if on_gpus else [], "arena": {"managed_gib": gib}}])
    value["models"]["other"]["kv_tokens"] = kv_tokens
    said = [finding for finding in findings(value)["instance group0"] if "arena.managed_gib" in finding[2]]
    assert [level for level, *_ in said] == levels and all(what in text for _, text, _ in said), said


def test_a_head_of_kv_lies_on_one_rank_at_least_and_a_latent_on_all(tmp_path: Path) -> None:
    heads = read(model(tmp_path, "heads", 1.0, layers=1)["path"], "here")
    assert [heads.kv_bytes_on_rank(ranks) for ranks in (1, 2, 4, 8)] == [2048, 1024, 512, 512]
    (tmp_path / "heads" / "config.json").write_text('{"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}')
    latent = read(str(tmp_path / "heads"), "here")
    assert [latent.kv_bytes_on_rank(ranks) for ranks in (1, 8)] == [1152, 1152]


def test_what_is_said_of_room_for_kv_is_what_the_arena_has(tmp_path: Path) -> None:
    found = findings(document(tmp_path, instances=[{**GROUP, "arena": ARENA}]))["instance group0"]
    said = [(level, text) for level, text, _ in found if "tokens of KV" in text]
    room = "about 983,040 tokens of KV beside it, less what workspaces take"
    assert said == [("ok", f"big takes 54.8 GiB of the 100.0 GiB of the arena a rank; {room}")]


def test_the_example_with_an_arena_fits_the_gpus_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALARIA_KEY", "secret")
    monkeypatch.setenv("TALARIA_ADMIN_KEY", "secret")
    value = yaml.safe_load((Path(__file__).resolve().parents[3] / "examples" / "cluster-tp8-arena.yaml").read_text(encoding="utf-8"))
    for name, weights_gib, layers, kv_heads in (("Qwen3-235B", 438.0, 94, 4), ("GLM-4.5-Air", 199.0, 46, 8)):
        value["models"][name]["path"] = model(tmp_path, name, weights_gib, layers, kv_heads)["path"]
    gpus = [Gpu(number, "NVIDIA H200", 143_771 * 2**20, 0, "580.82") for number in range(8)]
    found = findings(value, gpus=gpus, memory_bytes=1800 * GIB)
    said = {check: [text for level, text, _ in each if level != "ok"] for check, each in found.items() if check != "gateway"}
    assert {check: texts for check, texts in said.items() if texts} == {"profile": [found["profile"][0][1]]}, "it is still to be measured"
    assert any("Qwen3-235B takes 54.8 GiB of the 72.0 GiB of the arena" in text for _, text, _ in found["instance group0"])


def test_a_key_that_no_header_can_show_fails_wherever_it_stands(tmp_path: Path) -> None:
    found = findings(document(tmp_path, gateway={"port": 0, "admin_key": {"value": "two\nlines"}}))
    assert [level for level, *_ in found["gateway.admin_key"]] == ["warn", "fail"]


def test_gpus_come_from_the_drivers_own_table() -> None:
    table = "0, NVIDIA H200, 143771, 512, 570.1\n1, NVIDIA H200, [N/A], 0, 570.1\n"
    assert parse(table) == [Gpu(0, "NVIDIA H200", 143771 * 2**20, 512 * 2**20, "570.1")]


def test_the_command_prints_a_line_a_check_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({**document(tmp_path), "engine": {"python": "/nonexistent/python"}}))
    assert run_command(["doctor", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok ", "warn", "fail")) for line in lines) and "cannot be run" in lines[0]
    assert run_command(["doctor", str(path), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["passed"], len(printed["findings"])) == ("talaria.doctor/1", False, len(lines))
