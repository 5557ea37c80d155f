"""The agent's core in virtual time: what the conformance suite does not ask of every world."""

from __future__ import annotations

from dataclasses import replace

import pytest

from talaria.gpu.agent.group import MOST_ATTEMPTS
from talaria.gpu.agent.instance import BROKEN_OFF_S, STALE_S
from talaria.gpu.agent.leases import LEASE_WORD_S
from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import Admit, Cancelled, Close, EngineDown, LeaseChanged, Open, SegmentEnded, Stop, Switch, SwitchFailed
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import Residency
from tests.conformance.scenes import Scene, admitted, commanded, first_decode, swapped
from tests.conformance.suite import assert_rest
from tests.conformance.test_gpu import AgentWorld
from tests.conformance.world import Setup


def scene_of(setup: Setup | None = None) -> tuple[Scene, AgentWorld]:
    world = AgentWorld(setup or Setup())
    return Scene(world), world


def segment_end_s(world: AgentWorld, call: Call) -> float:
    """When the scheduler heard that the call had finished."""
    return next(
        s.now_s for s in world.steps if isinstance(s.event, SegmentEnded) and s.event.call_id == call.id and s.event.reason == "finished"
    )


def test_the_scheduler_hears_of_an_end_when_the_lease_is_known() -> None:
    scene, world = scene_of()
    world.answers_s = 0.02
    call = scene.first("a")
    world.settle()
    ended = world.books[call.id]
    assert segment_end_s(world, call) == pytest.approx(ended.ended_s + 0.02)
    step = next(step for step in world.steps if isinstance(step.event, SegmentEnded))
    assert call.key in step.view.models[call.key.model].leases and call.id not in step.view.models[call.key.model].running


def test_an_end_does_not_wait_long_for_a_gateway_that_says_nothing() -> None:
    scene, world = scene_of()
    world.answers_s = None
    call = scene.first("a")
    world.settle()
    assert segment_end_s(world, call) == pytest.approx(world.books[call.id].ended_s + LEASE_WORD_S)


def test_a_lease_does_not_end_before_the_submission_that_it_announces_has_arrived() -> None:
    """The slot lingers for a return; its lease is consumed while its prompt is rendered: SP takes it."""
    scene, world = scene_of(Setup(tau_s=30.0, knobs=replace(Knobs(), linger_s=5.0)))
    call = scene.first("a")
    scene.until(admitted("P"))
    scene.first("other", model=1)
    assert world.advance(lambda: bool(world.endings), 60.0)
    world.rendering_s = 0.3
    world.do(lambda: world.instance.lease_changed(call.key, None))
    again = scene.again("a")
    assert any(
        again.id in dict(command.batch) for command in world.steps[-1].commands if isinstance(command, Admit) and command.phase == "SP"
    )
    assert not any(isinstance(step.event, LeaseChanged) for step in world.steps)
    world.settle()
    assert_rest(scene)


def test_exact_counts_replace_estimates_before_the_scheduler_sees_a_call() -> None:
    scene, world = scene_of()
    call = scene.first("a", prompt=700)
    estimate = replace(call, id=2, prompt_tokens=9, turn=1, reusable_tokens=5, continues=(("main", 5),), exact=False)
    world.settle()
    prompt = world.tokens_of(call.key) + world.new_tokens(100)
    world.submit_prompt(estimate, prompt, 5)
    seen = world.steps[-1].view.models[call.key.model]
    item = (seen.waiting | seen.running)[2]
    assert (item.call.exact, item.call.prompt_tokens, item.call.reusable_tokens) == (True, 850, 750)
    assert item.device_tokens == 750 // 64 * 64
    world.settle()
    books = world.books[2]
    assert (books.prompt_tokens, books.device_tokens, books.recomputed_tokens) == (850, 704, 46)


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    scene, world = scene_of()
    call = scene.first("a", prompt=700_000)
    world.settle()
    assert world.endings == [(call.id, "failed")] and world.steps == [] and world.instance.seen.last == 1
    assert "700000" in world.books[call.id].why


def test_a_model_with_calls_in_flight_is_not_closed_to_make_room() -> None:
    scene, world = scene_of(Setup(max_resident_models=1))
    first_decode(scene, output=2000)
    scene.until(lambda step: isinstance(step.event, SwitchFailed))
    assert any(isinstance(command, Close) for step in world.steps for command in step.commands)
    assert world.engines.residency(world.models[0]) is Residency.ACTIVE
    world.settle()
    assert any(isinstance(command, Open) for step in world.steps for command in step.commands)
    assert {outcome for _, outcome in world.endings} == {"completed"}


def test_calls_do_not_wait_for_a_model_that_does_not_start() -> None:
    scene, world = scene_of(Setup(max_resident_models=1))
    scene.warm("a")
    call = scene.first("other", model=1)
    scene.until(commanded(Open))
    world.engines.refused[world.models[1]] = "no such file"
    world.fail_switch("no such file")
    assert (call.id, "failed") in world.endings and "no such file" in world.books[call.id].why
    refused = scene.first("later", model=1)
    assert (refused.id, "failed") in world.endings
    world.settle()
    assert world.instance.snapshot().seen_seq == 3


def test_a_call_under_which_engines_keep_dying_is_given_up() -> None:
    scene, world = scene_of()
    call = scene.first("poison", output=4000)
    for _ in range(MOST_ATTEMPTS):
        scene.until(scene.running(call))
        world.crash(0)
        world.recover()
    world.settle()
    assert world.endings == [(call.id, "failed")] and world.clients[call.id].failures[0][0] == 502


def test_a_call_that_has_sent_something_is_not_tried_again() -> None:
    scene, world = scene_of()
    begun, quiet = scene.first("begun", output=400), scene.first("quiet", output=400)
    scene.until(lambda step: {begun.id, quiet.id} <= set(step.view.models[begun.key.model].running))
    world.clients[begun.id].began = True
    world.crash(0)
    assert world.endings == [(begun.id, "failed")] and isinstance(world.steps[-1].event, Cancelled)
    world.recover()
    world.settle()
    assert world.endings == [(begun.id, "failed"), (quiet.id, "completed")]


def test_an_answer_that_breaks_off_while_its_engine_lives_is_a_failure_after_a_while() -> None:
    scene, world = scene_of()
    call = scene.first("a", output=4000)
    scene.until(scene.running(call))
    world.do(lambda: world.instance.connection_lost(world.instance.runs[call.id], arrived=True))
    began_s = world.now_s()
    assert world.advance(lambda: bool(world.endings), 60.0)
    assert world.endings == [(call.id, "failed")] and world.now_s() == pytest.approx(began_s + BROKEN_OFF_S)
    world.settle()
    assert_rest(scene)


def test_calls_that_find_nobody_at_an_engine_whose_death_is_not_heard_yet_wait_for_the_next_one() -> None:
    scene, world = scene_of()
    call = scene.first("a", output=40)
    scene.until(scene.running(call))
    world.rendering_s = 600.0  # longer than the rest of the scene: nobody is there
    world.crash(0)
    world.recover()
    run = world.instance.runs[call.id]
    assert world.advance(lambda: run.posted, 600.0)
    for _ in range(2 * MOST_ATTEMPTS):
        world.do(lambda: world.instance.connection_lost(run, arrived=False))
        world.advance(lambda: False, 2 * STALE_S)
    assert run.posted and not world.endings
    world.rendering_s = 0.0
    world.crash(0)
    world.recover()
    world.settle()
    assert world.endings == [(call.id, "completed")]


def test_a_call_that_is_stopped_while_its_prompt_is_rendered_again_has_one_token_first() -> None:
    scene, world = scene_of()
    call = scene.first("a", output=400)
    scene.until(scene.running(call))
    world.rendering_s = 0.5
    world.crash(0)
    world.recover()
    scene.until(admitted("P"))
    world.command(Stop((call.id,)))
    world.settle()
    again = next(at for at, step in enumerate(world.steps) if isinstance(step.event, EngineDown))
    ends = [step.event for step in world.steps[again:] if isinstance(step.event, SegmentEnded)]
    assert (ends[0].tokens, ends[-1].reason) == (1, "finished") and len(ends) > 1
    assert_rest(scene)


def test_a_silent_engine_with_running_calls_is_killed() -> None:
    scene, world = scene_of()
    call = scene.first("a", output=400)
    scene.until(scene.running(call))
    assert world.instance.group.hung(60.0) is None
    world.engines.say = lambda model, message: None
    world.pass_s(61.0)
    world.do(lambda: world.instance.group.hung(60.0))
    assert world.engines.killed == [call.key.model] and any(isinstance(step.event, EngineDown) for step in world.steps)
    world.settle()


def test_held_calls_wait_again_when_their_parked_engine_dies_and_the_other_goes_on() -> None:
    scene, world = scene_of()
    swapped(scene)
    first, second = world.models
    held = list(world.instance.view.models[first].held)
    world.do(lambda: world.engines.crash(first))
    assert world.instance.healthy() and world.instance.view.active == second
    assert list(world.instance.view.models[first].waiting) == held and world.instance.view.models[first].residency is Residency.ABSENT
    world.settle()
    assert_rest(scene)
    assert any(isinstance(command, Open) for step in world.steps for command in step.commands)


def test_a_reset_starts_from_the_first_model_with_nothing_known() -> None:
    scene, world = scene_of()
    scene.first("a")
    scene.first("b", model=1)
    world.settle()
    knobs = replace(Knobs(), tau_s=0.0)
    reset = world.loop.create_task(world.instance.reset(knobs, session_prefill=False))
    assert world.advance(reset.done, 600.0)
    snapshot = world.instance.snapshot()
    assert (snapshot.seen_seq, snapshot.lines, snapshot.capabilities.session_prefill) == (0, {}, False)
    assert world.instance.view.active == world.models[0] and world.instance.leases.live() == []
    assert len(world.engines.engines[world.models[0]].mirror) == 0


def test_a_line_s_lease_is_told_to_a_new_gateway_while_it_lives() -> None:
    scene, world = scene_of(Setup(tau_s=5.0))
    call = scene.first("a")
    assert world.advance(lambda: bool(world.endings), 60.0)
    assert [LineKey(*key) for key, _, _ in world.instance.leases.live()] == [call.key]
    world.pass_s(6.0)
    assert world.instance.leases.live() == []


def test_switches_are_reported_as_they_were() -> None:
    scene, world = scene_of()
    scene.first("a")
    scene.first("b", model=1)
    world.settle()
    (switch,) = world.switches
    assert (switch.source, switch.target, switch.path) == (*world.models, "h2d") and sum(switch.phases_s) > 0.0
    assert any(isinstance(command, Switch) for step in world.steps for command in step.commands)
