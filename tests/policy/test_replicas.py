"""The replica gate: Eq. 2, demand window, price of memory (SPEC §3.4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy.replicas import DemandWindow, hbm_price_s_per_gib
from talaria.policy.router import Router
from talaria.policy.snapshot import Residency
from tests.policy.clusters import GIB, call, finish, key, model, routed, router, snapshot

ABSENT = model(Residency.ABSENT, activate_s=2.0)


def holder_and_idle(wait_s: float = 4.0, nu: dict[str, float] | None = None, **knobs: object) -> Router:
    """``a`` holds the model and makes a call wait; ``b`` is idle and would have to open it."""
    busy = snapshot("a", {"m": model(queued=1, queued_work_s=wait_s)}, round_load_s=1.0)
    return router(busy, snapshot("b", {"m": ABSENT}), nu=nu, **knobs)


def test_a_replica_opens_only_if_the_gain_exceeds_swap_plus_memory_price_plus_nu() -> None:
    # gain = 1 call x (4 - 0) s; price = 2 s + 0 s/GiB (empty device) + nu
    assert routed(holder_and_idle(nu_s=1.9).place(call(1), 0.0)).instance == "b"
    assert routed(holder_and_idle(nu_s=2.0).place(call(1), 0.0)).instance == "a"


def test_nu_may_differ_by_model() -> None:
    assert routed(holder_and_idle(nu={"m": 60.0}, nu_s=0.0).place(call(1), 0.0)).instance == "a"


def test_a_model_that_no_instance_holds_passes_the_gate() -> None:
    made = router(snapshot("a", {"m": ABSENT}), snapshot("b", {"m": ABSENT}), nu_s=600.0)
    assert routed(made.place(call(1), 0.0)).opens


def test_a_model_that_only_an_unhealthy_instance_holds_passes_the_gate() -> None:
    made = holder_and_idle(nu_s=600.0)
    made.heartbeat("a", False, 0.0)
    placed = routed(made.place(call(1), 0.0))
    assert (placed.instance, placed.opens, placed.avoidable) == ("b", True, False)


def test_a_second_call_joins_the_replica_that_the_first_is_opening() -> None:
    made = router(snapshot("a", {"m": ABSENT}), snapshot("b", {"m": ABSENT}), nu_s=600.0)
    first, second = (routed(made.place(call(n, key(f"s{n}")), 0.0)) for n in (1, 2))
    assert first.instance == second.instance
    assert first.opens and second.opens and not second.avoidable


def test_opening_beside_a_healthy_holder_is_avoidable() -> None:
    placed = routed(holder_and_idle(nu_s=0.0).place(call(1), 0.0))
    assert placed.opens and placed.avoidable and not placed.residency_hit


def test_demand_that_had_to_wait_within_the_window_raises_the_gain() -> None:
    made = holder_and_idle(wait_s=3.0, nu_s=4.0, overload="shed")
    placed = [routed(made.place(call(n, key(f"s{n}"), prompt=10), 0.1 * n)).instance for n in range(4)]
    assert placed[0] == "a" and placed[-1] == "b"


def test_reserved_returns_raise_the_gain() -> None:
    made = holder_and_idle(wait_s=3.0, nu_s=4.0, lease_charge_s=0.0, tau_s=10.0)
    for number in range(2):
        finish(made, call(number, key(f"s{number}")), "a", 0.0)
    assert routed(made.place(call(9, key("new"), prompt=10), 0.0)).instance == "b"


def test_demand_outside_the_window_is_forgotten() -> None:
    window = DemandWindow(10.0)
    for time_s in (0.0, 5.0, 9.0):
        window.record("m", time_s)
    assert [window.calls("m", time_s) for time_s in (9.0, 10.0, 15.0, 19.0)] == [3, 2, 1, 0]
    assert window.calls("other", 9.0) == 0


@given(st.integers(0, 180), st.integers(0, 180), st.integers(0, 180))
def test_the_price_of_memory_grows_with_pressure_and_falls_with_staging_slack(used: int, more: int, slack: int) -> None:
    def price(used_gib: int, slack_gib: int) -> float:
        return hbm_price_s_per_gib(snapshot("a", {}, hbm_used_bytes=used_gib * GIB, slack_bytes=slack_gib * GIB), 0.002)

    low, high = sorted((used, more))
    assert 0.0 <= price(low, slack) <= price(high, slack) <= 0.002
    assert price(low, slack) <= price(low, 0)


def test_the_price_is_mu0_at_full_pressure_and_no_slack() -> None:
    assert hbm_price_s_per_gib(snapshot("a", {}, hbm_used_bytes=180 * GIB), 0.002) == pytest.approx(0.002)


def test_the_memory_footprint_of_the_model_is_priced() -> None:
    busy = snapshot("a", {"m": model(queued=1, queued_work_s=4.0)}, round_load_s=1.0)
    full = snapshot("b", {"m": ABSENT}, hbm_used_bytes=180 * GIB)
    # gain 4 s against 2 s swap + 50 GiB x mu0
    assert routed(router(busy, full, nu_s=0.0, mu0_s_per_gib=0.03).place(call(1), 0.0)).instance == "b"
    assert routed(router(busy, full, nu_s=0.0, mu0_s_per_gib=0.05).place(call(1), 0.0)).instance == "a"
