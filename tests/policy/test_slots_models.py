"""What a slot scheduler does with models: the order of its commands, staging, room for another, and what fails."""

from __future__ import annotations

from talaria.policy.instance import Close, Open, Stage, Switch, Unstage, Wait
from talaria.policy.snapshot import Residency
from tests.policy.builders import call, decoding, host


def test_the_follower_is_staged_while_a_slot_serves() -> None:
    made = decoding("a", "b", "c", linger_s=0.0)
    made.submit(call(2, "c"), call(3, "b"))
    made.run()
    staged = [command.model for command in made.commanded(Stage)]
    assert staged[:2] == ["c", "a"] or staged[:2] == ["b", "c"]


def test_nothing_is_staged_without_the_capability_or_rate() -> None:
    for off in ({"staging": False}, {"stage_rate": 0.0}):
        made = host("a", "b", **off)
        made.submit(call(1), call(2, "b"))
        made.run()
        assert made.commanded(Stage, Unstage) == []


def test_close_comes_before_open_where_the_instance_is_full() -> None:
    made = host("a", "b", max_resident_models=1)
    made.view.models["b"].residency = Residency.ABSENT
    made.submit(call(1, "b"))
    assert made.done[-1].commands == [Close("a"), Open("b")]


def test_the_model_with_the_least_to_do_is_closed() -> None:
    made = host("a", "b", "c", max_resident_models=2)
    made.view.models["c"].residency = Residency.ABSENT
    made.lease(call(9, "a").key, 60.0)
    made.submit(call(1, "c"))
    assert made.commanded(Close) == [Close("b")]


def test_a_model_is_opened_without_closing_another_while_there_is_room() -> None:
    made = host("a", "b", max_resident_models=2)
    made.view.models["b"].residency = Residency.ABSENT
    made.submit(call(1, "b"))
    assert made.done[-1].commands == [Open("b")]


def test_a_model_whose_switch_failed_sits_out_and_is_tried_again() -> None:
    made = host("a", "b")
    made.submit(call(1, "b"))
    made.fail_switch()
    assert made.done[-1].commands[-1] == Wait(2.0)
    made.run()
    assert len(made.commanded(Switch)) == 2 and made.ended[1][1] == "completed"


def test_others_are_served_while_a_failed_model_sits_out() -> None:
    made = host("a", "b", "c")
    made.submit(call(1, "b"), call(2, "c"))
    made.fail_switch()
    made.run()
    assert made.first_token_s[2] < made.first_token_s[1]


def test_what_an_engine_refuses_with_nothing_in_flight_is_tried_again_later_not_at_once() -> None:
    made = host("a", "b")
    made.refusals = 3
    made.submit(call(1))
    made.run()
    assert made.ended[1][1] == "completed" and made.now_s >= 3.0


def test_a_held_call_that_finds_no_memory_is_resumed_later() -> None:
    made = decoding("a", "b", output=400, linger_s=0.0)
    made.submit(call(2, "b"))
    made.at(3.3, setattr, made, "refusals", 2)
    made.run()
    assert {how for _, how in made.ended.values()} == {"completed"}


def test_a_slot_that_a_dead_engine_took_along_leaves_nothing_behind() -> None:
    made = decoding("a", "b")
    made.crash()
    made.submit(call(2, "b"))
    made.recover()
    made.run()
    assert set(made.ended) == {1, 2}
