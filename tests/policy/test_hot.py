"""Hot instances run the same scheduler: any waiting call at any decode boundary; no round, no linger, no switch (DESIGN)."""

from __future__ import annotations

from typing import Any

import pytest

from talaria.policy.instance import Admit, Close, Open, Resume, Stage, Switch, Unstage, Wait
from tests.policy.builders import STEPS, ModelHost, call, host


def hot(**more: Any) -> ModelHost:
    return host("a", hot=True, staging=False, **more)


def test_a_new_session_is_admitted_at_the_next_decode_boundary() -> None:
    made = hot()
    made.submit(call(1, output=1000))
    made.run(1.0)
    made.submit(call(2))
    assert made.admitted_at(2) == 1.0
    made.run()
    assert made.first_token_s[2] == pytest.approx(1.2, abs=0.021)


def test_nothing_is_admitted_while_a_batch_is_in_prefill() -> None:
    made = hot()
    made.submit(call(1, prompt=20_000))
    made.submit(call(2))
    made.run()
    assert made.admitted_at(2) == made.first_token_s[1]


def test_a_call_runs_to_its_end_in_one_grant() -> None:
    made = hot()
    made.submit(call(1, output=10 * STEPS))
    made.run()
    assert made.commanded(Resume) == [] and len(made.commanded(Admit)) == 1


def test_a_hot_instance_never_lingers_switches_or_stages() -> None:
    made = hot(lease_s=5.0)
    for number in range(1, 6):
        made.at(2.0 * number, made.submit, call(number, session="s", turn=number - 1))
    made.run()
    assert len(made.ended) == 5 and made.commanded(Switch, Open, Close, Stage, Unstage, Wait) == []


def test_prefill_of_one_batch_is_limited_so_that_decode_is_not_starved() -> None:
    made = hot()
    made.submit(call(1, output=1000))
    made.run(1.0)
    made.submit(call(2, prompt=60_000))
    made.submit(call(3, prompt=60_000), call(4, prompt=60_000))  # 6.1 s each; two do not fit γ·T_TTFT
    made.run()
    assert made.batches("P")[1:] == [(2,), (3,), (4,)]


def test_memory_limits_what_is_admitted() -> None:
    made = hot(kv_tokens=3000)
    made.submit(*(call(number, prompt=2000, output=100) for number in range(1, 4)))
    made.run()
    assert made.batches("P") == [(1,), (2,), (3,)] and set(made.ended) == {1, 2, 3}


def test_tenants_take_turns_on_a_hot_instance_too() -> None:
    made = hot(max_running=3)
    made.submit(call(0, prompt=20_000))
    made.submit(*(call(number, tenant="greedy") for number in range(1, 6)), call(9, tenant="modest"))
    made.run()
    assert 9 in made.batches("P")[1]


def test_a_busy_hot_instance_sums_up_at_least_every_ttft_target() -> None:
    made = hot()
    for number in range(1, 60):
        made.at(0.5 * number, made.submit, call(number, output=100))
    made.run()
    assert all(summary.ended_s - summary.started_s <= 10.0 + 2.0 for summary in made.rounds)
    assert sum(summary.slots[0].p_admitted for summary in made.rounds) == 59


def test_a_hot_instance_reopens_its_model_after_a_crash() -> None:
    made = hot()
    made.submit(call(1, output=1000))
    made.run(1.0)
    made.crash()
    made.recover()
    assert made.commanded(Switch) == [Switch("a")]
    made.run()
    assert made.ended[1][1] == "completed"


def test_a_hot_instance_repeats_a_failed_switch_after_a_pause() -> None:
    made = hot()
    made.crash()
    made.recover()
    made.fail_switch()
    assert made.done[-1].commands == [Wait(2.0)]
    made.run()
    assert made.commanded(Switch) == [Switch("a"), Switch("a")] and made.view.active == "a"


def test_a_refused_call_is_tried_again_after_a_pause() -> None:
    made = hot(refusals=2)
    made.submit(call(1))
    made.run()
    assert made.ended[1][1] == "completed" and len(made.commanded(Admit)) == 3 and made.admitted_at(1) == 0.0 < made.first_token_s[1] - 1.9
