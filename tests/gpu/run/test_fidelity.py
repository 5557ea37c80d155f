"""The simulator's bar on real SGLang: profile, replay, simulate and validate 24 sessions, three repetitions (minutes; full tier)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fidelity import fidelity, prepare


@pytest.mark.full
def test_the_simulated_median_session_is_within_the_bar(engine_python: str, tmp_path: Path) -> None:
    prepare(tmp_path, engine_python, sessions=24)
    found = fidelity(tmp_path, repetitions=3)
    rows = {row["metric"]: row for row in found["metrics"]}
    assert (rows["sessions_completed"]["measured"], rows["calls_failed"]["measured"], rows["calls_shed"]["measured"]) == (24, 0, 0)
    assert found["decisions"]["differences"] == 0 and found["decisions"]["count"] > 0
    assert found["sessions"]["count"] == 24 and found["sessions"]["unmatched"] == 0
    assert found["bar"]["passed"], found["bar"] | {"sessions": found["sessions"]}
