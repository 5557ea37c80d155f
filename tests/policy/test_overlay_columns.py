"""The ready columns are a function of the newest snapshots and the overlay, however these came about (SPEC §3.5)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.fleet import Fleet
from talaria.policy.knobs import Knobs
from talaria.policy.overlay import Overlay
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, Residency
from tests.policy.clusters import model, snapshot

INSTANCES = {"a": Capabilities(), "b": Capabilities(hot=True)}
NUMERIC = ("coefficients", "slot_at_s", "queued_s", "kv_room_tokens", "open_price_s", "not_held")

steps = st.lists(
    st.tuples(
        st.sampled_from(["forward", "forward", "over", "reserve", "release", "snapshot"]),
        st.sampled_from("ab"),
        st.sampled_from("mn"),
        st.sampled_from(Residency),
        st.integers(0, 3),
        st.sampled_from([("m", "n"), ("m",)]),
    ),
    max_size=40,
)


def observed(instance: str, version: int, residency: Residency, calls: int, names: tuple[str, ...], seen_seq: int) -> InstanceSnapshot:
    models = {name: model(residency, queued=calls, queued_work_s=0.3 * calls, next_slot_s=0.1 * calls) for name in names}
    return snapshot(
        instance, models, version, float(version), seen_seq=seen_seq, round_load_s=1.7 * calls, capabilities=INSTANCES[instance]
    )


def change(
    overlay: Overlay, number: int, kind: str, instance: str, name: str, alive: dict[int, str], leases: dict[tuple[str, str], int]
) -> None:
    """One step that is no snapshot, where it is possible."""
    if kind == "forward":
        overlay.forward(number, instance, name, 0.7 + 0.1 * number, 500.0)
        alive[number] = instance
    elif kind == "reserve":
        overlay.reserve(instance, name)
        leases[instance, name] = leases.get((instance, name), 0) + 1
    elif kind == "release" and leases.get((instance, name)):
        overlay.release(instance, name)
        leases[instance, name] -= 1
    elif kind == "over" and alive:
        oldest = min(alive)
        del alive[oldest]
        overlay.over(oldest)


@given(steps)
def test_patched_columns_equal_columns_that_are_built_from_scratch(
    history: list[tuple[str, str, str, Residency, int, tuple[str, ...]]],
) -> None:
    overlay = Overlay(INSTANCES, 0.25)
    fleet = Fleet(INSTANCES, Knobs(), {}, overlay)
    alive: dict[int, str] = {}
    leases: dict[tuple[str, str], int] = {}
    for instance in INSTANCES:
        fleet.observe(observed(instance, 1, Residency.ACTIVE, 0, ("m", "n"), 0), 1.0)
    for number, (kind, instance, name, residency, calls, names) in enumerate(history, 2):
        if kind == "snapshot":
            seen_seq = max(0, overlay.submitted(instance) - calls)
            overlay.seen(instance, seen_seq)
            fleet.observe(observed(instance, number, residency, calls, names, seen_seq), float(number))
        else:
            change(overlay, number, kind, instance, name, alive, leases)
        if calls % 2:  # whenever a host has time, or a placement asks
            fleet.refresh()
    scratch = Fleet(INSTANCES, Knobs(), {}, overlay)
    for item in fleet.snapshots:
        assert item is not None
        scratch.observe(item, 0.0)
    for i, item in enumerate(fleet.snapshots):
        for name in item.models if item is not None else ():
            ready, built = fleet.columns(name), scratch.columns(name)
            assert ready is not None and built is not None
            for column in NUMERIC:
                assert np.array_equal(getattr(ready, column)[..., i], getattr(built, column)[..., i]), (name, column)
            assert (i in ready.closed) == (i in built.closed)
    assert np.array_equal(fleet.round_room_s, scratch.round_room_s)
    assert np.array_equal(fleet.pressure, scratch.pressure)


def test_a_model_that_is_no_longer_listed_is_neither_served_nor_held() -> None:
    fleet = Fleet(INSTANCES, Knobs(), {}, Overlay(INSTANCES, 0.25))
    fleet.observe(observed("a", 1, Residency.ABSENT, 0, ("m", "n"), 0), 0.0)
    fleet.refresh()
    fleet.observe(observed("a", 2, Residency.ABSENT, 0, ("m",), 0), 0.0)
    columns = fleet.columns("n")
    assert columns is not None
    assert not fleet.takes_new(columns, 0.0).any()
    assert np.isinf(columns.not_held).all() and not columns.closed
