"""Knobs that change while calls run: what was promised stays, what is decided next goes by the new ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from talaria.policy.knobs import KNOBS, Knobs
from talaria.policy.leases import Lease
from talaria.policy.router import ROUTERS, Overloaded, Router, Usage
from talaria.policy.snapshot import Residency
from tests.policy import builders
from tests.policy.builders import ModelHost
from tests.policy.clusters import call, key, model, routed, router, snapshot

OTHER = Knobs(
    tau_s=7.0, gamma=0.4, nu_s=3.0, linger_s=0.1, lease_charge_s=2.0, t_ttft_s=25.0, t_tpot_s=0.2, control_window_s=3.0, mu0_s_per_gib=1.0,
    visit_idle=True, round_share="demand", round_order="oldest", sp_order="cheapest", max_wait_rounds=1, ewma_alpha=0.7, stale_after_s=2.0,
    sticky_start="cost", overload="shed", queue_limit=1, queue_deadline_s=3.0, stage_rate=0.5,
)  # fmt: skip
USAGE = Usage(1000, 0, 100)


def busy(name: str, **knobs: Any) -> Router:
    """Two instances, one of which is at risk, holds a lease and has a call on its way."""
    working = model(queued=3, in_flight=2, queued_work_s=2.0, next_slot_s=1.0)
    made = router(
        snapshot("a", {"m": working, "n": model(Residency.ABSENT)}, hbm_used_bytes=90 << 30, round_load_s=4.0),
        snapshot("b", {"m": model(Residency.PARKED), "n": model()}), name=name, **knobs,
    )  # fmt: skip
    made.place(call(1), 0.5)
    return made


def test_other_knobs_change_every_one() -> None:
    assert all(getattr(OTHER, knob.field) != knob.default for knob in KNOBS)


@pytest.mark.parametrize("name", list(ROUTERS))
def test_a_router_that_was_given_knobs_decides_as_one_that_began_with_them(name: str) -> None:
    """Overload aside, which would have placed the first call differently."""
    knobs = replace(OTHER, overload="spill")
    tuned, began = busy(name), busy(name, **{knob.field: getattr(knobs, knob.field) for knob in KNOBS})
    tuned.set_knobs(knobs, 1.0)
    for now_s in (1.0, 1.9, 2.1):  # the last one when telemetry is stale by the new knob only
        for wanted in ("m", "n"):
            asked = call(9, key("other", wanted))
            assert tuned.explain(asked, now_s) == began.explain(asked, now_s)
    leases = [made.completed(call(1), "a", USAGE, 2.5) for made in (tuned, began)]
    assert leases[0] == leases[1]


def test_a_lease_that_was_granted_keeps_its_expiry_and_the_next_one_has_the_new_tau() -> None:
    made = router(snapshot("a", {"m": model()}), tau_s=1.0)
    first = made.completed(call(1), "a", USAGE, 0.0)
    made.set_knobs(replace(made.knobs, tau_s=30.0), 0.5)
    assert isinstance(first, Lease) and made.next_poll_s() == first.expires_s == 1.0
    second = made.completed(call(2, key("t")), "a", USAGE, 0.6)
    assert second is not None and second.expires_s == pytest.approx(30.6)
    made.set_knobs(replace(made.knobs, tau_s=0.0), 0.7)
    assert made.completed(call(3, key("u")), "a", USAGE, 0.7) is None
    assert routed(made.place(call(4, reusable=1100), 0.9)).reason == "lease", "what was promised is kept"
    assert made.lease_counts.granted == 2


def test_a_queued_call_is_offered_again_and_keeps_its_deadline() -> None:
    full = snapshot("a", {"m": model(in_flight=1)}, round_load_s=8.9)
    made = router(full, overload="queue", queue_deadline_s=5.0)
    assert isinstance(made.place(call(1, prompt=50_000), 0.0), Overloaded) and made.next_poll_s() == 5.0
    made.set_knobs(replace(made.knobs, queue_deadline_s=1.0), 0.1)
    assert made.poll(0.1) == [] and made.next_poll_s() == 5.0
    made.set_knobs(replace(made.knobs, t_ttft_s=100.0), 0.2)
    assert made.next_poll_s() == 0.2
    (placed,) = made.poll(0.2)
    assert routed(placed).reason == "queue"


# --- slots ----------------------------------------------------------------------------------------------------------------


def lingering(linger_s: float) -> ModelHost:
    """A slot with nothing to do but to wait for a return that a lease promises; another model has work."""
    made = builders.host("a", "b", linger_s=linger_s)
    made.submit(builders.call(1, output=1))
    made.lease(builders.call(1).key, 20.0)
    made.submit(builders.call(2, "b", output=1))
    return made


def test_an_open_slot_lingers_by_the_new_knob_from_the_next_step_on() -> None:
    kept, tuned = lingering(1.5), lingering(1.5)
    tuned.at(0.5, tuned.scheduler.set_knobs, replace(tuned.knobs, linger_s=3.0))
    for made in (kept, tuned):
        made.run(30.0)
    ends_s = [made.rounds[0].slots[0].closed_s for made in (kept, tuned)]
    assert ends_s == pytest.approx([1.5, 3.0])


def test_the_open_round_keeps_its_plan_and_the_next_one_has_the_new_targets() -> None:
    made = builders.host("a", "b")
    made.submit(builders.call(1, output=2000), builders.call(2, "b", output=2000))
    while not made.rounds:
        made.run(made.now_s + 0.25)
    made.scheduler.set_knobs(replace(made.knobs, t_ttft_s=made.knobs.t_ttft_s / 2))
    made.run(60.0)
    steps = [[slot.d_steps for slot in summary.slots] for summary in made.rounds]
    shorter_s = 0.5 * builders.BOUND_S * 2 * 0.02 / made.knobs.t_tpot_s  # of the round: what both models decode of it
    assert len(set(steps[1])) == len(set(steps[2])) == 1 and steps[1][0] - steps[2][0] > 0.9 * shorter_s / made.knobs.t_tpot_s
