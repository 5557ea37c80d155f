"""The simulator's bar on real SGLang: profile, replay, simulate and validate 24 sessions, three repetitions (minutes; full tier)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fidelity import fidelity, prepare
from talaria.profiles import load

MIX_DIFFERENCE = 0.35
"""Share of switches that may be on another path than simulated."""


@pytest.mark.full
def test_the_simulated_median_session_is_within_the_bar(engine_python: str, tmp_path: Path) -> None:
    prepare(tmp_path, engine_python, sessions=24)
    found = fidelity(tmp_path, repetitions=3)
    rows = {row["metric"]: row for row in found["metrics"]}
    assert (rows["sessions_completed"]["measured"], rows["calls_failed"]["measured"], rows["calls_shed"]["measured"]) == (24, 0, 0)
    assert found["decisions"]["differences"] == 0 and found["decisions"]["count"] > 0
    assert found["sessions"]["count"] == 24 and found["sessions"]["unmatched"] == 0
    assert found["bar"]["passed"], found["bar"] | {"sessions": found["sessions"]}


@pytest.mark.full
def test_the_mix_of_switch_paths_is_predicted(engine_python: str, tmp_path: Path) -> None:
    """What staging had reached by each switch, with rates as they were profiled on the same engines."""
    prepare(tmp_path, engine_python, sessions=24, staged=True)
    found = fidelity(tmp_path, repetitions=2)
    rows = {row["metric"]: row for row in found["metrics"]}
    assert (rows["sessions_completed"]["measured"], rows["calls_failed"]["measured"], rows["calls_shed"]["measured"]) == (24, 0, 0)
    assert found["decisions"]["differences"] == 0 and found["decisions"]["count"] > 0
    hardware = load(str(tmp_path / "measured.json")).file.document()["hardware"]
    assert {hardware[name]["provenance"] for name in ("staging_bytes_per_s", "d2d_bytes_per_s", "restore_bytes_per_s")} == {"measured"}
    mix = found["switches"]
    assert all(sum(mix[which].values()) == pytest.approx(1) for which in ("simulated", "measured"))
    assert sum(share > 0 for share in mix["measured"].values()) > 1, "one path only is easily predicted"
    assert mix["difference"] <= MIX_DIFFERENCE, mix
