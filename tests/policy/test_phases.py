"""Each phase is told once, when it is over, with the model that it began with."""

from __future__ import annotations

from talaria.policy.phases import PhaseWatch


def test_a_phase_is_told_when_the_next_one_begins_and_idleness_is_not() -> None:
    told: list[tuple[str, str, float, float]] = []
    watch = PhaseWatch(lambda *phase: told.append(phase), 0.0)
    seen = [
        ("idle", "a", 1.0), ("P", "a", 2.0), ("P", "a", 3.0), ("D1", "a", 4.0), ("switch", "b", 5.0), ("P", "b", 7.0),
        ("idle", None, 8.0), ("switch", None, 9.0), ("D1", "b", 10.0), ("D1", "a", 11.0), ("idle", None, 12.0),
    ]  # fmt: skip
    for name, model, now_s in seen:
        watch.see(name, model, now_s)
    assert told == [("P", "a", 2.0, 4.0), ("D1", "a", 4.0, 5.0), ("switch", "b", 5.0, 7.0), ("P", "b", 7.0, 8.0), ("D1", "b", 10.0, 12.0)]
