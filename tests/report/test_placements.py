"""Why each call went where it went, from a log of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria.errors import InputError
from talaria.report.declog import DecisionLog
from talaria.report.placements import placements
from talaria.sim import config, run, scenario


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    plan = run.plan(scenario.load("paper-tp4-tau"), config.get("talaria"))
    with DecisionLog(path) as written:
        run.simulate(plan, 0, log=written)
    return path


def test_every_call_of_a_session_is_explained_with_all_its_candidates(log: Path) -> None:
    explained = list(placements(log, "i0003-m1"))
    assert [call.turn for call, _ in explained] == [0, 1, 2, 3, 4]
    for call, why in explained:
        assert why.call_id == call.id
        assert [candidate.instance for candidate in why.candidates] == ["cold-0", "cold-1"]
        assert why.chosen in ("cold-0", "cold-1")


def test_one_turn_can_be_asked_for(log: Path) -> None:
    assert [call.turn for call, _ in placements(log, "i0003-m1", 2)] == [2]


def test_an_unknown_session_or_turn_is_one_clear_line(log: Path) -> None:
    with pytest.raises(InputError, match=r"unknown session 'i0003-m7'.*did you mean"):
        list(placements(log, "i0003-m7"))
    with pytest.raises(InputError, match="session 'i0003-m1' has no turn 99; allowed: turns 0 to 4"):
        list(placements(log, "i0003-m1", 99))
