"""The in-flight overlay: by submission number, never negative, conserved (SPEC §3.5)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from talaria.policy.overlay import Overlay


def overlay(*work_s: float) -> Overlay:
    made = Overlay(["a"], 0.25)
    for number, seconds in enumerate(work_s, 1):
        assert made.forward(number, "a", "m", seconds, 100.0) == number
    return made


def test_an_entry_leaves_when_a_snapshot_has_seen_its_number() -> None:
    made = overlay(1.0, 2.0, 4.0)
    made.seen("a", 2)
    assert made.total("a") == (1, 4.0)
    assert made.load("a", "m").kv_tokens == 100.0


def test_an_older_snapshot_brings_nothing_back() -> None:
    made = overlay(1.0, 2.0)
    made.seen("a", 2)
    made.seen("a", 1)
    assert made.total("a") == (0, 0.0)


def test_a_call_that_ends_unseen_weighs_nothing_but_keeps_its_number() -> None:
    made = overlay(1.0, 2.0)
    made.over(1)
    assert made.total("a") == (1, 2.0)
    made.seen("a", 1)
    assert made.total("a") == (1, 2.0)


def test_rounding_leaves_no_load_behind() -> None:
    made = overlay(0.1, 0.2, 0.3)
    for number in (2, 1, 3):
        made.over(number)
    assert made.total("a") == (0, 0.0)


class Conservation(RuleBasedStateMachine):
    """Random submissions to two instances, some of which never arrive, against a model that plays the instances."""

    names = st.sampled_from(["a", "b"])

    @initialize()
    def start(self) -> None:
        self.overlay = Overlay(["a", "b"], 0.25)
        self.next_call = 0
        self.arrived: dict[str, list[int]] = {"a": [], "b": []}
        self.seen: dict[str, int] = {"a": 0, "b": 0}
        self.over: set[int] = set()
        self.work_s: dict[int, float] = {}
        self.leases = 0

    @rule(name=names, model=st.sampled_from(["m", "n"]), work_s=st.floats(0.0, 100.0))
    def submit(self, name: str, model: str, work_s: float) -> None:
        self.next_call += 1
        self.work_s[self.next_call] = work_s
        self.arrived[name].append(self.next_call)
        assert self.overlay.forward(self.next_call, name, model, work_s, work_s) == len(self.arrived[name])

    @rule(name=names, model=st.sampled_from(["m", "n"]), work_s=st.floats(0.0, 100.0))
    def submit_in_vain(self, name: str, model: str, work_s: float) -> None:
        self.submit(name, model, work_s)
        self.overlay.over(self.next_call)
        self.over.add(self.next_call)

    @rule(name=names, share=st.floats(0.0, 1.0))
    def a_snapshot_arrives(self, name: str, share: float) -> None:
        seq = round(share * len(self.arrived[name]))
        self.overlay.seen(name, seq)
        self.seen[name] = max(self.seen[name], seq)

    @precondition(lambda self: any(self.arrived.values()))
    @rule(name=names, share=st.floats(0.0, 1.0))
    def a_call_ends(self, name: str, share: float) -> None:
        if self.arrived[name]:
            number = self.arrived[name][min(len(self.arrived[name]) - 1, int(share * len(self.arrived[name])))]
            self.overlay.over(number)
            self.over.add(number)

    @rule(name=names)
    def a_lease_comes_and_goes(self, name: str) -> None:
        self.overlay.reserve(name, "m")
        self.overlay.release(name, "m")

    @invariant()
    def the_overlay_is_what_was_submitted_and_is_neither_seen_nor_over(self) -> None:
        for name in ("a", "b"):
            unseen = [number for number in self.arrived[name][self.seen[name] :] if number not in self.over]
            calls, work_s = self.overlay.total(name)
            assert calls == len(unseen)
            assert work_s >= 0.0
            assert work_s == pytest.approx(sum(self.work_s[number] for number in unseen), abs=1e-9)
            assert self.overlay.submitted(name) == len(self.arrived[name])


Conservation.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestConservation = Conservation.TestCase
