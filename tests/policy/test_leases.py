"""Leases: born on completion, ended once, matched by prefix, charged as one admission unit (SPEC §3.1, §3.2 step 1)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from talaria.policy.leases import Lease, LeaseTable
from talaria.policy.overlay import Overlay
from talaria.policy.router import Router, Usage
from talaria.policy.snapshot import LineState, Residency, Tier
from tests.policy.clusters import call, finish, held_line, key, model, routed, router, snapshot


def two_instances(**knobs: object) -> Router:
    """Both hold the model; ``b`` is the cheaper one, so that only a lease sends a call to ``a``."""
    return router(snapshot("a", {"m": model(queued_work_s=5.0, queued=1)}), snapshot("b", {"m": model()}), **knobs)


def served_on_a(**knobs: object) -> Router:
    made = two_instances(**knobs)
    finish(made, call(1), "a", now_s=1.0)
    return made


RETURN = call(2, prompt=1300, reusable=1100)


def test_a_lease_is_consumed_by_the_matching_return() -> None:
    made = served_on_a()
    assert routed(made.place(RETURN, 1.5)).reason == "lease"
    assert routed(made.place(replace(RETURN, id=3), 1.6)).reason == "cost"
    assert made.lease_counts.used == 1


def test_a_lease_sends_the_return_to_the_instance_that_served_it() -> None:
    assert routed(served_on_a().place(RETURN, 1.5)).instance == "a"


def test_a_lease_is_live_before_its_expiry_and_not_at_it() -> None:
    assert routed(served_on_a().place(RETURN, 1.999)).reason == "lease"
    assert routed(served_on_a().place(RETURN, 2.0)).reason == "cost"


def test_tau_zero_grants_no_lease() -> None:
    made = served_on_a(tau_s=0.0)
    assert routed(made.place(RETURN, 1.0)).reason == "cost"
    assert made.lease_counts.granted == 0 and made.drain_lease_changes() == []


def test_routing_does_not_refresh_a_lease_but_its_completion_installs_a_successor() -> None:
    made = served_on_a()
    made.place(RETURN, 1.9)
    made.drain_lease_changes()
    assert made.next_poll_s() is None
    finish(made, RETURN, "a", now_s=4.0)
    assert made.drain_lease_changes() == [("a", key(), 5.0)]


def test_a_return_takes_the_lease_whose_prefix_it_continues_longest() -> None:
    made = two_instances()
    finish(made, call(1, key(line="main")), "a", 1.0)
    finish(made, call(2, key(line="fork")), "b", 1.0)
    fork = call(3, key(line="third"), prompt=1300, reusable=900, continues=(("main", 900), ("fork", 300)))
    assert routed(made.place(fork, 1.5)).instance == "a"
    assert made.drain_lease_changes()[-1] == ("a", key(line="main"), None)


def test_a_call_that_continues_none_takes_none() -> None:
    made = served_on_a()
    assert routed(made.place(call(2, turn=1), 1.5)).reason == "cost"
    assert routed(made.place(call(3, turn=1, continues=(("main", 0),)), 1.5)).reason == "cost"


@pytest.mark.parametrize("other", [key(session="other"), key(model_name="n"), key(tenant="u"), key(line="other")])
def test_a_return_of_another_line_takes_no_lease(other: object) -> None:
    made = router(snapshot("a", {"m": model(), "n": model(Residency.PARKED)}))
    finish(made, call(1), "a", 1.0)
    assert routed(made.place(replace(RETURN, key=other), 1.5)).reason == "cost"


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_newer_snapshot_that_still_reports_the_prefix_keeps_the_lease(tier: Tier) -> None:
    made = served_on_a()
    made.observe(snapshot("a", {"m": model()}, version=2, time_s=1.2, lines={key(): held_line(tier=tier)}), 1.3)
    assert routed(made.place(RETURN, 1.5)).reason == "lease"


@pytest.mark.parametrize("lines", [{}, {key(): held_line(tier=Tier.MISSING)}, {key(): held_line(tokens=0)}])
def test_a_newer_snapshot_without_the_prefix_discards_the_lease(lines: dict) -> None:
    made = served_on_a()
    made.observe(snapshot("a", {"m": model(queued_work_s=5.0, queued=1)}, version=2, time_s=1.2, lines=lines), 1.3)
    assert routed(made.place(RETURN, 1.5)).instance == "b"
    assert (made.lease_counts.discarded, made.lease_counts.unused) == (1, 1)


def test_a_snapshot_from_before_the_completion_cannot_deny_the_lease() -> None:
    made = served_on_a()
    made.observe(snapshot("a", {"m": model()}, version=2, time_s=0.9), 1.4)
    assert routed(made.place(RETURN, 1.5)).reason == "lease"


def test_an_unhealthy_instance_discards_the_lease() -> None:
    made = served_on_a()
    made.heartbeat("a", False, 1.2)
    assert routed(made.place(RETURN, 1.5)).instance == "b"


def test_a_stale_but_healthy_instance_still_honours_its_lease() -> None:
    made = served_on_a(tau_s=30.0, stale_after_s=5.0)
    made.observe(snapshot("b", {"m": model()}, version=2, time_s=9.0), 9.0)
    assert routed(made.place(RETURN, 10.0)).instance == "a"


def test_a_live_lease_charges_one_admission_unit_against_its_instance() -> None:
    waits = {}
    for charge_s in (0.0, 0.25):
        made = router(snapshot("a", {"m": model()}), tau_s=10.0, lease_charge_s=charge_s)
        for number in range(4):
            finish(made, call(number, key(f"s{number}")), "a", 1.0)
        terms = made.explain(call(9, key("new")), 1.0).candidates[0].terms
        assert terms is not None
        waits[charge_s] = terms.wait_s
    assert waits[0.25] - waits[0.0] == pytest.approx(4 * 0.25)


def test_a_charge_ends_with_its_lease() -> None:
    made = router(snapshot("a", {"m": model()}), tau_s=1.0)
    finish(made, call(1), "a", 1.0)
    made.poll(2.0)
    terms = made.explain(call(9, key("new")), 2.0).candidates[0].terms
    assert terms is not None and terms.wait_s == 0.0


@pytest.mark.parametrize("charge_s", [0.0, 0.5])
def test_opens_rise_and_residency_falls_with_tau_only_if_a_lease_is_charged(charge_s: float) -> None:
    """Two instances, one holds the model and has just served 20 sessions; then ten new sessions come."""
    opens, hits = [], []
    for tau_s in (0.0, 2.0, 60.0):
        holder = snapshot("a", {"m": model(in_flight=1)}, round_load_s=1.0)
        made = router(holder, snapshot("b", {"m": model(Residency.ABSENT)}), tau_s=tau_s, lease_charge_s=charge_s, nu_s=5.0)
        for number in range(20):
            finish(made, call(number, key(f"old{number}")), "a", now_s=0.2 * number)
        made.observe(replace(holder, version=2, time_s=4.0), 4.0)
        placed = [routed(made.place(call(100 + n, key(f"new{n}"), prompt=500), 4.0)) for n in range(10)]
        opens.append(sum(item.opens for item in placed))
        hits.append(sum(item.residency_hit for item in placed))
    if charge_s:
        assert opens[0] < opens[-1] and hits[0] > hits[-1]
        assert opens == sorted(opens) and hits == sorted(hits, reverse=True)
    else:
        assert len(set(opens)) == len(set(hits)) == 1


def test_an_expired_lease_is_unused_unless_its_return_came_to_that_instance_in_time() -> None:
    made = router(snapshot("a", {"m": model()}))
    finish(made, call(1, key("gone")), "a", 1.0)
    finish(made, call(2, key("rewritten")), "a", 1.0)
    made.place(call(3, key("rewritten"), turn=1), 1.5)
    made.poll(2.0)
    assert (made.lease_counts.unused, made.lease_counts.returned) == (1, 1)


def test_a_failed_submission_gives_the_lease_back_until_its_expiry() -> None:
    made = served_on_a()
    first = routed(made.place(RETURN, 1.5))
    made.submit_failed(RETURN, first, 1.6)
    assert routed(made.place(RETURN, 1.7)).reason == "lease"
    assert (made.lease_counts.granted, made.lease_counts.used) == (1, 1)


def test_a_failed_submission_after_the_expiry_leaves_an_unused_lease() -> None:
    made = served_on_a()
    first = routed(made.place(RETURN, 1.5))
    made.submit_failed(RETURN, first, 2.5)
    assert (made.lease_counts.used, made.lease_counts.unused) == (0, 1)


def test_a_completion_that_may_not_reserve_ends_the_old_lease_and_grants_none() -> None:
    made = served_on_a()
    made.completed(RETURN, "a", Usage(1000, 900, 50), 1.5, False)
    assert (made.lease_counts.granted, made.lease_counts.unused) == (1, 1)
    assert made.drain_lease_changes()[-1] == ("a", key(), None)


def test_a_new_router_takes_over_leases_and_lines() -> None:
    line = LineState(Tier.DEVICE, 800, 1.0)
    made = router(snapshot("a", {"m": model()}), snapshot("b", {"m": model()}, lines={key(): line}, time_s=2.0))
    made.adopt("b", [Lease(key(), "b", 850, 1.0, 9.0), Lease(key("over"), "b", 850, 0.0, 1.0)], [key()], 2.0)
    placed = routed(made.place(RETURN, 2.0))
    assert (placed.instance, placed.reason) == ("b", "lease")
    counts = made.lease_counts
    assert (counts.granted, counts.used) == (1, 1)


def test_an_adopted_line_is_priced_where_its_prefix_lies() -> None:
    line = LineState(Tier.DEVICE, 800, 1.0)
    made = router(snapshot("a", {"m": model()}), snapshot("b", {"m": model()}, lines={key(): line}, time_s=2.0))
    assert routed(made.place(RETURN, 2.0)).instance == "a"
    made.adopt("b", [], [key()], 2.0)
    assert routed(made.place(RETURN, 2.0)).instance == "b"


def test_adopting_leaves_a_line_its_own_lease() -> None:
    made = served_on_a()
    made.adopt("a", [Lease(key(), "a", 1, 0.0, 99.0)], [], 1.2)
    assert (made.lease_counts.granted, made.next_poll_s()) == (1, 2.0)


def test_the_host_learns_of_every_grant_and_end_in_order() -> None:
    made = served_on_a()
    made.place(RETURN, 1.5)
    finish(made, RETURN, "a", 2.0)
    made.poll(3.0)
    assert made.drain_lease_changes() == [("a", key(), 2.0), ("a", key(), None), ("a", key(), 3.0), ("a", key(), None)]
    assert made.drain_lease_changes() == []


class LeaseLifecycle(RuleBasedStateMachine):
    """Random grants, returns, discards, failures and time; a plain model says which leases live."""

    lines = st.sampled_from([key("s1"), key("s1", line="sub"), key("s2"), key("s2", model_name="n")])
    instances = st.sampled_from(["a", "b"])

    @initialize(tau_s=st.sampled_from([0.0, 0.5, 3.0]))
    def start(self, tau_s: float) -> None:
        self.now_s, self.tau_s = 0.0, tau_s
        self.overlay = Overlay(["a", "b"], 0.25)
        self.table = LeaseTable(self.overlay)
        self.live: dict = {}

    @rule(delta_s=st.sampled_from([0.0, 0.25, 1.0, 5.0]))
    def time_passes(self, delta_s: float) -> None:
        self.now_s += delta_s
        self.table.expire(self.now_s)
        self.live = {name: item for name, item in self.live.items() if self.now_s < item.expires_s}

    @rule(line=lines, instance=instances)
    def a_call_completes(self, line: object, instance: str) -> None:
        lease = self.table.grant(line, instance, 1000, self.now_s, self.tau_s)
        self.live.pop(line, None)
        if lease is not None:
            assert lease.expires_s == self.now_s + self.tau_s
            self.live[line] = lease

    @rule(line=lines, instance=instances, how=st.sampled_from(["use", "discard", "fail", "other"]))
    def a_return_comes(self, line: object, instance: str, how: str) -> None:
        back = call(1, line, prompt=1200, reusable=1000)
        lease = self.table.match(back, self.now_s)
        assert lease is self.live.get(line)
        if how == "other" or lease is None:
            self.table.came_back(back, instance)
        elif how == "discard":
            self.table.discard(lease, instance)
            del self.live[line]
        else:
            self.table.consume(lease)
            if how == "fail":
                self.table.restore(lease, self.now_s)
            else:
                del self.live[line]

    @invariant()
    def every_granted_lease_is_live_or_ended_exactly_once(self) -> None:
        counts = self.table.counts
        assert counts.granted == len(self.table) + counts.used + counts.unused + counts.returned
        assert len(self.table) == len(self.live)

    @invariant()
    def the_overlay_charges_exactly_the_live_leases(self) -> None:
        for instance in ("a", "b"):
            charged = sum(item.instance == instance for item in self.live.values())
            assert self.overlay.total(instance) == (0, charged * 0.25)

    @invariant()
    def the_next_expiry_is_that_of_a_live_lease(self) -> None:
        assert self.table.next_expiry_s() == min((item.expires_s for item in self.live.values()), default=None)


LeaseLifecycle.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestLeaseLifecycle = LeaseLifecycle.TestCase
