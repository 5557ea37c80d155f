"""The studies' own arithmetic; their results are committed beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from studies.calibrate import __main__ as calibrate
from studies.tuning import __main__ as tuning
from studies.tuning.capacity import fewest
from studies.tuning.common import RESULTS, ratio, with_tools
from talaria.sim import scenario as scenarios
from talaria.workload.open import open_workload


@pytest.mark.parametrize("needed", range(1, 20))
def test_bisection_finds_the_fewest_and_asks_few(needed: int) -> None:
    asked: list[int] = []

    def keeps(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert fewest(keeps, 16) == (needed if needed <= 16 else None)
    assert len(asked) <= 1 + math.log2(16)


def test_slower_tools_are_the_same_calls_with_longer_gaps() -> None:
    recorded = scenarios.load("paper-tp4-high")
    slower = with_tools(recorded, 3.0)
    pairs = zip(open_workload(recorded.workload, 1).sessions(), open_workload(slower.workload, 1).sessions(), strict=True)
    for left, right in pairs:
        assert [3 * call.gap_s for call in left.calls] == pytest.approx([call.gap_s for call in right.calls])
    assert recorded.gap_cap_s is not None and slower.gap_cap_s == 3 * recorded.gap_cap_s


def test_a_policy_under_which_a_session_has_no_end_is_worse_than_any() -> None:
    assert ratio([1.0, math.inf], [2.0, 2.0]).low == math.inf


def test_every_study_has_its_table_and_figure() -> None:
    for name in ("knobs", "robustness", "capacity"):
        assert "| " in (RESULTS / f"{name}.md").read_text(encoding="utf-8") and (RESULTS / f"{name}.png").exists()


@pytest.mark.parametrize(("main", "arguments", "said"), [
    (tuning.main, ["all", "nowhere.jsonl"], "nowhere.jsonl is no file"),
    (calibrate.main, ["fit", "tp4", "--trials", "0"], "--trials is from 4, --rounds from 0"),
    (calibrate.main, ["fit", "tp4", "--rounds", "-1"], "--trials is from 4, --rounds from 0"),
])  # fmt: skip
def test_a_study_that_cannot_run_says_so_before_it_begins(
    main: Callable[[], int], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["study", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err
