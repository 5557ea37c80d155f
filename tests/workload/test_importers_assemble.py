"""Recorded times become dependencies and gaps that, replayed at the recorded durations, give the recorded times back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.workload.importers.assemble import RecordedCall, assemble, assemble_all, linear_reuse_tokens
from talaria.workload.importers.report import ImportReport
from talaria.workload.session import TraceCall

SECONDS = st.integers(1, 50).map(lambda tenths: tenths / 10)


@dataclass
class Recorder:
    """Draws an agent's calls one after another; some of them start subagents that run beside the next calls."""

    draw: st.DrawFn
    calls: list[RecordedCall]
    agents: int = 0

    def run(self, agent: str, parent: str | None, now_s: float, depth: int) -> None:
        for _ in range(self.draw(st.integers(1, 4))):
            end_s = now_s + self.draw(SECONDS)
            self.calls.append(RecordedCall("m", 100, 10, agent, parent, start_s=now_s, end_s=end_s))
            for _ in range(self.draw(st.integers(0, 2)) if depth < 2 else 0):
                self.agents += 1
                self.run(f"agent-{self.agents}", agent, end_s + self.draw(SECONDS), depth + 1)
            now_s = end_s + self.draw(SECONDS) * self.draw(st.sampled_from([1, 10]))


@st.composite
def recordings(draw: st.DrawFn) -> list[RecordedCall]:
    recorder = Recorder(draw, [])
    recorder.run("main", None, 0.0, 0)
    return recorder.calls


def replayed_starts_s(calls: tuple[TraceCall, ...], durations_s: list[float]) -> list[float]:
    """Starts of calls released by their dependencies and gaps alone."""
    starts_s: list[float] = []
    for call in calls:
        ready_s = max((starts_s[index] + durations_s[index] for index in call.waits_for), default=0.0)
        starts_s.append(ready_s + call.gap_s)
    return starts_s


@given(recordings())
def test_replaying_at_the_recorded_durations_gives_the_recorded_starts(recorded: list[RecordedCall]) -> None:
    calls = assemble("s", recorded, ImportReport()).calls
    in_order = sorted(recorded, key=lambda call: call.start_s or 0.0)
    durations_s = [(call.end_s or 0.0) - (call.start_s or 0.0) for call in in_order]
    assert replayed_starts_s(calls, durations_s) == pytest.approx([call.start_s for call in in_order], abs=1e-4)


@given(recordings(), st.integers(2, 20))
def test_a_slower_model_delays_calls_by_its_own_time_only(recorded: list[RecordedCall], factor: int) -> None:
    calls = assemble("s", recorded, ImportReport()).calls
    in_order = sorted(recorded, key=lambda call: call.start_s or 0.0)
    durations_s = [(call.end_s or 0.0) - (call.start_s or 0.0) for call in in_order]
    slow_s = replayed_starts_s(calls, [duration_s * factor for duration_s in durations_s])
    for call, start_s in zip(calls, slow_s, strict=True):
        ready_s = max((slow_s[index] + durations_s[index] * factor for index in call.waits_for), default=0.0)
        assert start_s - ready_s == pytest.approx(call.gap_s)


@given(recordings())
def test_a_line_is_a_chain_in_which_each_call_waits_for_the_one_before(recorded: list[RecordedCall]) -> None:
    last: dict[str, int] = {}
    for index, call in enumerate(assemble("s", recorded, ImportReport()).calls):
        if call.turn:
            assert last[call.line] in call.waits_for
        else:
            assert (call.spawned_by is None) == (call.line == "main")
        last[call.line] = index


@pytest.mark.parametrize(
    ("prompt_tokens", "reuse_tokens"),
    [(2000, 1100), (1100, 1100), (1050, 1000), (1000, 1000), (999, 300)],
    ids=["history and more", "history", "response shortened", "response dropped", "rewritten"],
)
def test_without_hashes_reuse_follows_from_the_prompts_growth(prompt_tokens: int, reuse_tokens: int) -> None:
    earlier = RecordedCall("m", 1000, 100)
    assert linear_reuse_tokens(earlier, RecordedCall("m", prompt_tokens, 1, cached_tokens=300)) == reuse_tokens


def test_stated_reuse_comes_before_any_estimate() -> None:
    assert linear_reuse_tokens(RecordedCall("m", 1000, 100), RecordedCall("m", 2000, 1, reuse_tokens=40)) == 40


def test_sessions_of_one_clock_start_at_zero_in_order() -> None:
    call = RecordedCall("m", 1, 1, start_s=1_700_000_000.25, end_s=1_700_000_001.0)
    sessions = assemble_all({"late": [replace(call, start_s=1_700_000_002.75)], "early": [call]}, ImportReport())
    assert [(session.id, session.start_s) for session in sessions] == [("early", 0.0), ("late", 2.5)]
