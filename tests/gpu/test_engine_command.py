"""What an engine is started with, on GPUs and on the CPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from talaria.gpu import config
from talaria.gpu.engine.command import Place, command, environment, free_port
from talaria.gpu.protocol.arena import SOCKET_VARIABLE as ARENA_VARIABLE
from talaria.gpu.protocol.engine import MODEL_VARIABLE, SOCKET_VARIABLE
from talaria.gpu.protocol.memory import SOCKET_VARIABLE as POOL_VARIABLE

MODEL = config.Model(path="/models/big", tool_parser="qwen25", kv_tokens=4096, arguments=("--page-size", "8"), environment={"A": "model"})
CPU = config.Instance(name="g0", models=("big",), max_running=7)
GPUS = config.Instance(name="g0", models=("big",), gpus=(4, 5), tp=2)
SETTINGS = config.Engine(python="/venv/bin/python", arguments=("--page-size", "32", "--x"), environment={"A": "cluster", "B": "cluster"})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(31000, tmp_path, "s3cret")


def options(words: list[str]) -> dict[str, str]:
    """Flag to the value that SGLang takes: the last one; empty for flags without value."""
    found = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_the_models_arguments_win_over_the_clusters_and_those_over_ours(place: Place) -> None:
    words = command("big", MODEL, CPU, SETTINGS, place)
    assert words[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]
    given = options(words)
    assert given["--page-size"] == "8" and "--x" in given
    assert (given["--served-model-name"], given["--model-path"], given["--port"]) == ("big", "/models/big", "31000")
    assert (given["--max-running-requests"], given["--max-total-tokens"], given["--tp-size"]) == ("7", "4096", "1")
    assert given["--tool-call-parser"] == "qwen25" and "--reasoning-parser" not in given
    assert {"--enable-cache-report", "--enable-metrics", "--sleep-on-idle"} <= given.keys()
    assert given["--stream-interval"] == "1" and given["--schedule-policy"] == "fcfs"


def test_memory_is_saved_only_where_there_is_a_gpu(place: Place) -> None:
    on_cpu = options(command("big", MODEL, CPU, SETTINGS, place))
    on_gpu = options(command("big", MODEL, GPUS, SETTINGS, place))
    assert on_gpu.keys() - on_cpu.keys() == {"--enable-memory-saver", "--enable-weights-cpu-backup", "--cuda-graph-backend-prefill"}
    assert on_gpu["--tp-size"] == "2"


def test_in_an_arena_sglang_copies_no_weights_to_the_host(place: Place) -> None:
    shared = replace(place, arena=Path("/run/arena"))
    own, given = (options(command("big", MODEL, GPUS, SETTINGS, start)) for start in (place, shared))
    assert own.keys() - given.keys() == {"--enable-weights-cpu-backup"} and not given.keys() - own.keys()
    alone, together = (environment("big", MODEL, GPUS, SETTINGS, start, Path("/run/hold")) for start in (place, shared))
    assert together.items() - alone.items() == {(ARENA_VARIABLE, "/run/arena"), ("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")}


def test_only_an_engine_with_a_pool_keeps_kv_on_the_host(place: Place) -> None:
    pooled = replace(place, pool=Path("/run/memory"))
    without, given = (options(command("big", MODEL, GPUS, SETTINGS, start)) for start in (place, pooled))
    assert given.keys() - without.keys() == {
        "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "--unified-cache-external-linker-config",
    }  # fmt: skip
    assert environment("big", MODEL, GPUS, SETTINGS, pooled, Path("/run/holds"))[POOL_VARIABLE] == "/run/memory"
    assert POOL_VARIABLE not in environment("big", MODEL, GPUS, SETTINGS, place, Path("/run/holds"))


def test_events_and_sockets_are_nobody_elses(place: Place) -> None:
    events = json.loads(options(command("big", MODEL, CPU, SETTINGS, place))["--kv-events-config"])
    assert events["publisher"] == "zmq"
    assert {events["endpoint"], events["replay_endpoint"]} == {place.kv_events, place.kv_replay}
    assert events["endpoint"].startswith(f"ipc://{place.directory}/")


def test_the_key_is_in_a_file_that_only_its_owner_reads(place: Place) -> None:
    words = command("big", MODEL, CPU, SETTINGS, place)
    assert not [word for word in words if "s3cret" in word]
    secrets = Path(options(words)["--config"])
    assert json.loads(secrets.read_text()) == {"admin-api-key": "s3cret"}
    assert secrets.stat().st_mode & 0o077 == 0


def test_the_environment_names_gpus_model_and_agent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    on_gpu = environment("big", MODEL, GPUS, SETTINGS, place, Path("/run/holds"))
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "4,5" and on_gpu["TMS_RETAIN_CPU_BACKUP"] == "1"
    assert (on_gpu[MODEL_VARIABLE], on_gpu[SOCKET_VARIABLE], on_gpu["TMPDIR"]) == ("big", "/run/holds", str(place.directory))
    assert (on_gpu["A"], on_gpu["B"], on_gpu["INHERITED"]) == ("model", "cluster", "yes")
    on_cpu = environment("big", MODEL, CPU, SETTINGS, place, Path("/run/holds"))
    assert not [name for name in on_cpu.keys() - os.environ.keys() if name.startswith(("CUDA", "TMS", "NCCL"))]


def test_ports_are_below_those_of_outgoing_connections() -> None:
    assert all(20000 <= free_port() < 32768 for _ in range(20))
