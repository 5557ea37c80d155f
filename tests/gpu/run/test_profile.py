"""``talaria-gpu profile`` measures what the engines do, and writes what the simulator takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from talaria.cli.gpu import run_command
from talaria.cli.main import run_command as run_sim
from talaria.errors import InputError
from talaria.gpu import config
from talaria.gpu.modelfiles import ModelFiles
from talaria.gpu.profiling import write
from talaria.gpu.profiling.grid import decode_points, prefill_points
from talaria.gpu.profiling.measure import STAGING_KNOBS, Measured, ModelMeasured, Restored, step_s
from talaria.gpu.protocol import records
from talaria.policy.knobs import Knobs, with_values
from talaria.profiles import load
from talaria.profiles.points import DecodePoint, PrefillPoint
from tests.conformance.scenes import Scene
from tests.conformance.world import Setup
from tests.gpu.cluster import stub_document
from tests.gpu.test_agent_staging import StagingWorld

PREFILL_TOKEN_S, STEP_S, LATE_S = 1e-4, 0.01, 10.0


def test_points_fit_the_model_and_its_kv() -> None:
    assert all(point.new + point.cached < 3000 for point in prefill_points(3000))
    assert all(point.batch * point.context < 20_000 and point.batch <= 16 for point in decode_points(3000, 20_000, 16))
    assert {point.batch for point in decode_points(3000, 20_000, 16)} == {1, 2, 4, 8, 16}


def row(first_token_s: float, ended_s: float, tokens: int = 11) -> records.CallRow:
    return records.CallRow(
        1, "default", "s", "l", "m", 0, "g0", "completed", "", "cost", False, True, False, False, False, False, False, 0, 0, 0.0, 0.0, 0.0,
        first_token_s, ended_s, 100, 0, 0, 0, tokens,
    )  # fmt: skip


def test_a_step_is_timed_by_the_sequence_that_no_prefill_interrupts() -> None:
    assert step_s([row(0.0, 3.5), row(1.0, 3.0), row(0.5, 3.2)]) == pytest.approx(0.2)
    assert step_s([row(1.0, 1.0)]) > 0, "policies divide by it"


def test_a_fit_that_misses_its_points_says_so_wherever_its_numbers_stand(tmp_path: Path) -> None:
    """The first model follows the shape; of the second a decode point is off by ten."""
    cluster = config.check(stub_document(tmp_path), "test")
    files = {name: ModelFiles(name, 2, 1000, 64, 2) for name in cluster.models}
    measured = Measured()
    for name, spoilt in zip(cluster.models, (1.0, 10.0), strict=True):
        found = measured.models[name] = ModelMeasured(10_000, 4096)
        found.prefill = [PrefillPoint(tokens=new + cached, cached=cached, ms=5 + new / 10) for new in (8, 64, 256) for cached in (0, 256)]
        found.decode = [DecodePoint(batch=b, context=c, ms=10 + b + b * c / 1000) for b in (1, 2, 4, 8) for c in (128, 512, 1024)]
        found.decode[5] = DecodePoint(batch=2, context=1024, ms=found.decode[5].ms * spoilt)
    source = "a test"
    made = write.points(measured, cluster, files, name="p", source=source, open_s=1.0, gpu="CPU", hbm_bytes=None, base=None)
    file = write.profile(made, measured)
    good, bad = cluster.models
    ((which, why),) = write.poor_fits(file, cluster.models).items()
    assert which == (bad, "decode") and "limit 15%" in why and "at batch" in why
    document = file.document()
    assert document["description"].endswith(f"Poor fits: {bad} decode.")
    assert why in document["models"][bad]["decode_base_s"]["source"]
    assert "poor fit" not in json.dumps([document["models"][good], document["models"][bad]["prefill_base_s"]])


def test_a_call_beside_which_is_staged_ends_in_one_slot_and_the_next_model_is_visited() -> None:
    world = StagingWorld(Setup(knobs=with_values(Knobs(), STAGING_KNOBS)))
    scene = Scene(world)
    for model in (0, 1):
        known = len(world.switches)
        scene.first(f"long{model}", model=model, output=2000)
        world.settle()
        scene.first(f"touch{model}", model=model, output=2)
        world.settle()
        moves = [(row.source, row.target) for row in world.switches[known:]]
        assert (world.models[model], world.models[1 - model]) in moves and len(moves) <= 4


def switch(target: str, path: str, weights_s: float, save_s: float = 0.01, rate: float = 0.0) -> records.SwitchRow:
    d2d, h2d = {"d2d": (8000, 0), "partial": (5000, 3000), "h2d": (0, 8000)}[path]
    return records.SwitchRow("g0", "a", target, 0.0, (save_s, weights_s, 0.0, 0.0, 0.0), path, d2d / 8000, 0.0, d2d, h2d, rate)


def test_restores_staging_and_gathers_are_in_the_profile_as_they_were_measured(tmp_path: Path) -> None:
    document = stub_document(tmp_path)
    document["instances"][0]["arena"] = {"managed_gib": 1, "chunk_kib": 1024}
    cluster = config.check(document, "test")
    first, second = cluster.models
    files = {name: ModelFiles(name, 2, 8000, 64, 2) for name in cluster.models}
    measured = Measured({name: ModelMeasured(10_000, 4096) for name in cluster.models})
    measured.switches = [switch(second, "h2d", 0.8)] * 3

    def hardware() -> dict[str, Any]:
        return write._hardware(measured, cluster, files, 1, "a test", None, None)

    made = hardware()
    assert {made[name]["provenance"] for name in ("staging_bytes_per_s", "d2d_bytes_per_s", "restore_bytes_per_s")} == {"assumed"}
    assert made["chunk_bytes"] == {"value": 2**20, "provenance": "measured", "source": "the cluster file"}
    measured.staged = [
        switch(first, "d2d", 0.1, 0.03, 2000.0), switch(second, "d2d", 0.2, 0.03, 900.0), switch(second, "d2d", 0.2, 0.03, 1000.0),
        switch(first, "partial", 0.5, 0.03, 1000.0),
    ]  # fmt: skip
    measured.restored = [Restored(first, tokens, 0.5 + tokens * 64 / 1e6) for tokens in (256, 1024, 4096)]
    made = hardware()
    values = {name: made[name]["value"] for name in made}
    assert made["d2d_bytes_per_s"]["source"] == "4 switches (3 d2d, 1 partial), a test"
    assert (values["h2d_bytes_per_s"], values["d2d_bytes_per_s"], values["staging_bytes_per_s"]) == (10_000, 40_000, 1000)
    assert (values["save_phase_s"], values["stager_phase_s"]) == (0.01, pytest.approx(0.02))
    assert (values["restore_bytes_per_s"], values["restore_base_s"]) == (pytest.approx(1e6), pytest.approx(0.5))
    measured.restored = [Restored(first, tokens, tokens * 64 / 1e6 - 1e-3) for tokens in (256, 1024, 4096)]
    assert hardware()["restore_base_s"]["value"] == 0.0, "a base below nothing is none"


def test_a_profile_is_of_one_group_size(tmp_path: Path) -> None:
    cluster = config.check(stub_document(tmp_path), "test")
    assert write.common_tp(cluster) == cluster.instances[0].tp
    other = cluster.instances[0].model_copy(update={"tp": 2})
    with pytest.raises(InputError, match="one tp"):
        write.common_tp(cluster.model_copy(update={"instances": (*cluster.instances, other)}))


def test_recurrent_state_is_the_bases_or_says_that_it_is_unknown(tmp_path: Path) -> None:
    cluster = config.check(stub_document(tmp_path), "test")
    name = "Qwen3.5-35B-A3B"
    model = next(iter(cluster.models.values())).model_copy(update={"family": "recurrent"})
    cluster = cluster.model_copy(update={"models": {name: model, "other": model}})
    assert write._state(cluster, name, "h200") == {}
    for of, base in ((name, None), ("other", "h200")):
        assert all("placeholder" in found["source"] for found in write._state(cluster, of, base).values())


def test_a_measured_cluster_can_be_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    document = stub_document(tmp_path, step_s=STEP_S, engine={"start_timeout_s": 30.0})
    document["engine"]["environment"]["STUB_PREFILL_TOKEN_S"] = str(PREFILL_TOKEN_S)
    Path("cluster.yaml").write_text(yaml.safe_dump(document))
    assert run_command(["profile", "cluster.yaml", "-o", "ours.json", "--max-tokens", "1200", "--repeats", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["profile"], printed["scenario"]) == ("ours.json", "ours-scenario.yaml")
    assert {item["model"] for item in printed["poor_fits"]} <= {"m0", "m1"}
    profile, points = load("./ours.json"), json.loads(Path("ours-points.json").read_text(encoding="utf-8"))
    for model in ("m0", "m1"):
        for point in points["models"][model]["prefill"]:
            assert point["ms"] >= 0.9e3 * (point["tokens"] - point["cached"]) * PREFILL_TOKEN_S, "late, never early"
        timing = profile.timing(model)
        for fitted_s, true_s in ((timing.prefill_s(800, 0), 800 * PREFILL_TOKEN_S), (timing.step_s(1, 500), STEP_S)):
            assert 0.0 < fitted_s <= true_s + LATE_S, "a loaded machine is late, and a line through that can lie anywhere below"
        fits = profile.file.document()["fits"][model]
        assert fits["prefill"]["points"] >= 4 and fits["decode"]["points"] >= 4
        assert profile.file.document()["models"][model]["open_s"]["provenance"] == "measured"
    hardware = profile.file.document()["hardware"]
    assert hardware["save_phase_s"]["provenance"] == hardware["call_overhead_s"]["provenance"] == "measured"
    assert profile.hardware.call_overhead_s > 0.0, "two hops of HTTP and a socket take their time"
    assert run_sim(["profile", "check", "./ours.json"]) == 0
    capsys.readouterr()
    assert run_sim(["run", "--scenario", "./ours-scenario.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["profiles"] == {"ours": profile.hash}
