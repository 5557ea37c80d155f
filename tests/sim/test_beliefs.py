"""Prediction and truth are different objects: a wrong profile is corrected, and shows as deadline risk meanwhile (SPEC §3.5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from talaria.policy import fleet
from talaria.policy.instance import EngineView
from talaria.policy.timing import Timing
from talaria.profiles import load as load_profile
from talaria.report.record import RunRecord
from talaria.sim import run
from talaria.sim.instance import SimInstance
from talaria.sim.run import simulate
from tests.sim.worlds import A, B, chain, world

ALL = ("prefill", "decode", "restore", "switch")


class BeliefLog:
    """Stands in for a decision log and keeps only what each scheduler last believed."""

    def __init__(self) -> None:
        self.last: dict[str, Timing] = {}

    def header(self, **described: Any) -> None: ...

    def router(self, method: str, arguments: Any, result: Any, now_s: float) -> None: ...

    def slots(self, instance: str, event: Any, view: EngineView, now_s: float, commands: Any) -> None:
        self.last.update({name: model.timing for name, model in view.models.items()})


def wrong_by(folder: Path, factor: float, *, alpha: float, log: Any = None) -> RunRecord:
    """Long new prompts for two models, more than a round can hold; every belief starts as truth × ``factor``. No staging slows them."""
    work = [chain(f"s{number}", 1, model=(A, B)[number % 2], prompt=50_000, output=60, start_s=0.7 * number) for number in range(80)]
    error = {kind: factor for kind in ALL}
    planned = world(folder, work, config_name="h2d-only", arrivals="trace", knobs={"ewma_alpha": alpha}, belief_error=error)
    return simulate(planned, 0, log=log)


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_profile_wrong_by_thirty_percent_is_corrected(factor: float, tmp_path: Path) -> None:
    log = BeliefLog()
    wrong_by(tmp_path, factor, alpha=0.2, log=log)
    profile = load_profile("paper-tp8")
    for name in (A, B):
        belief, truth = log.last[name], profile.timing(name)
        assert belief.prefill_s(40_000, 0) == pytest.approx(truth.prefill_s(40_000, 0), rel=0.05)
        assert belief.step_s(8, 320_000) == pytest.approx(truth.step_s(8, 320_000), rel=0.05)


def test_without_correction_the_belief_stays_wrong(tmp_path: Path) -> None:
    log = BeliefLog()
    wrong_by(tmp_path, 1.3, alpha=0.0, log=log)
    assert log.last[A].prefill_s(40_000, 0) == pytest.approx(1.3 * load_profile("paper-tp8").timing(A).prefill_s(40_000, 0))


def test_a_profile_that_is_too_fast_overruns_its_rounds_until_it_is_corrected(tmp_path: Path) -> None:
    def overruns(record: RunRecord) -> Any:
        return record.rounds["wall_s"] > 9.0

    learnt = 10
    """Rounds after which a belief that learns is right."""

    uncorrected, corrected = (wrong_by(tmp_path, 0.6, alpha=alpha) for alpha in (0.0, 0.2))
    assert overruns(uncorrected)[learnt:].sum() >= 3 and not overruns(corrected)[learnt:].any()
    for record in (uncorrected, corrected):
        assert record.rounds["deadline_risk"][overruns(record)].all()


def test_a_profile_that_is_too_slow_shows_more_deadline_risk_until_it_is_corrected(tmp_path: Path) -> None:
    right, uncorrected, corrected = (wrong_by(tmp_path, factor, alpha=alpha) for factor, alpha in ((1.0, 0.2), (1.3, 0.0), (1.3, 0.2)))
    assert right.deadline_risk < uncorrected.deadline_risk and corrected.deadline_risk < uncorrected.deadline_risk


def test_deadline_risk_moves_traffic_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two instances is ten times slower than anybody believes, and beliefs are never corrected: only its
    deadline risk tells the router."""
    build = run._build

    def slow_second(plan: Any, index: int, *rest: Any) -> SimInstance:
        instance = build(plan, index, *rest)
        if index == 1:
            slow = {name: truth.scaled(prefill=10.0, decode=10.0) for name, truth in instance._ground.timing.items()}
            instance._ground = replace(instance._ground, timing=slow)
            instance._engine.load(A, slow[A])
        return instance

    monkeypatch.setattr(run, "_build", slow_second)
    work = [chain(f"s{number}", 1, prompt=50_000, output=60, start_s=1.5 * number) for number in range(80)]
    groups = ({"count": 2, "models": [A]},)

    def share_of_second() -> float:
        record = simulate(world(tmp_path, work, instances=groups, arrivals="trace", knobs={"ewma_alpha": 0.0}, models=[A]), 0)
        return float(np.mean(record.calls["instance"] == 1))

    told = share_of_second()
    monkeypatch.setattr(fleet, "RISK_SHARE", 0.0)
    assert told < 0.5 * share_of_second()
