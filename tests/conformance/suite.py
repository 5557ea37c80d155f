"""The conformance suite: every event in every phase, and what must hold whatever happens to an instance.

An event that the world can bring about itself is brought about (a cancellation, a crash, a failed switch); one that would be
out of place in a phase comes as a late report of something long past, as real engines send them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest

from talaria.policy.calls import LineKey
from talaria.policy.codec import CODEC
from talaria.policy.instance import (
    Admit,
    Arrived,
    Cancelled,
    EngineDown,
    EngineUp,
    Event,
    FirstToken,
    LeaseChanged,
    Rejected,
    RestoredShort,
    Resume,
    SegmentEnded,
    StageProgress,
    Stop,
    SwitchDone,
    SwitchFailed,
    Tick,
)  # fmt: skip
from tests.conformance.legality import Referee
from tests.conformance.scenes import PHASES, Scene, admitted
from tests.conformance.world import Setup, World

LONG_PAST = 999_999  # a call that nobody here knows any more


def arrive_new(scene: Scene) -> None:
    scene.first("newcomer")


def arrive_elsewhere(scene: Scene) -> None:
    scene.first("elsewhere", model=len(scene.world.models) - 1)


def cancel_oldest(scene: Scene) -> None:
    _cancel(scene, 0)


def cancel_newest(scene: Scene) -> None:
    _cancel(scene, -1)


def _cancel(scene: Scene, which: int) -> None:
    """One of the live calls, or one that has only just come."""
    if not scene.live():
        scene.first("fickle")
    scene.world.cancel(scene.live()[which])


def stop(scene: Scene) -> None:
    """All segments that run are ended early, twice over."""
    for _ in range(2):
        scene.world.command(Stop(tuple(forwarded(scene))))


def forwarded(scene: Scene) -> list[int]:
    """Calls that run after the last step."""
    if not scene.world.steps:
        return []
    last = scene.world.steps[-1]
    running = [call_id for model in last.view.models.values() for call_id in model.running]
    batches = [command.batch for command in last.commands if isinstance(command, Admit | Resume)]
    return running + [call_id for batch in batches for call_id, _ in batch]


def refuse(scene: Scene) -> None:
    scene.world.refuse_next("no free KV")
    scene.first("unlucky")


def lease_ends(scene: Scene) -> None:
    """A lease is granted, and ends before it expires."""
    key = LineKey("tenant", "a", scene.world.models[0], "main")
    scene.world.instance.lease_changed(key, scene.world.now_s() + 5.0)
    scene.world.instance.lease_changed(key, None)


def crash(scene: Scene) -> None:
    scene.world.crash(0)


def crash_twice(scene: Scene) -> None:
    """Down, up, and down again before anything could recover."""
    for rank in (0, 1):
        scene.world.crash(rank)
        scene.world.recover()


def recover(scene: Scene) -> None:
    scene.world.recover()


def switch_fails(scene: Scene) -> None:
    """The switch under way fails; where there is none, an old failure is reported late."""
    if _switch_under_way(scene.world):
        scene.world.fail_switch("chunk checksum")
    else:
        scene.world.deliver(SwitchFailed(scene.world.models[-1], "chunk checksum"))


def switch_done(scene: Scene) -> None:
    """The switch under way ends; where there is none, an old one is reported late."""
    if _switch_under_way(scene.world):
        scene.until(lambda step: isinstance(step.event, SwitchDone))
    else:
        scene.world.deliver(SwitchDone(scene.world.models[-1], (0.1, 0.1, 0.1, 0.1, 0.1), "h2d"))


def _switch_under_way(world: World) -> bool:
    referee = Referee()
    referee.follow(world.steps)
    return referee.switching is not None


def deliver(make: Callable[[Scene], Event]) -> Callable[[Scene], None]:
    return lambda scene: scene.world.deliver(make(scene))


def _some_call(scene: Scene) -> int:
    return next(iter(scene.live()), LONG_PAST)


HAPPENINGS: dict[str, tuple[type, Callable[[Scene], None]]] = {
    "a new session arrives": (Arrived, arrive_new),
    "a call of the last model arrives": (Arrived, arrive_elsewhere),
    "the oldest call is cancelled": (Cancelled, cancel_oldest),
    "the newest call is cancelled": (Cancelled, cancel_newest),
    "a late cancellation": (Cancelled, deliver(lambda scene: Cancelled(LONG_PAST))),
    "a late first token": (FirstToken, deliver(lambda scene: FirstToken(LONG_PAST))),
    "a late end of a segment": (SegmentEnded, deliver(lambda scene: SegmentEnded(LONG_PAST, 10, "finished"))),
    "what runs is stopped": (SegmentEnded, stop),
    "the next call is refused": (Rejected, refuse),
    "a late refusal": (Rejected, deliver(lambda scene: Rejected(LONG_PAST, "no free KV"))),
    "less is restored": (RestoredShort, deliver(lambda scene: RestoredShort(_some_call(scene), 64))),
    "staging advances": (StageProgress, deliver(lambda scene: StageProgress(scene.world.models[-1], 0.5, 0.1))),
    "a switch ends": (SwitchDone, switch_done),
    "a switch fails": (SwitchFailed, switch_fails),
    "the engine dies": (EngineDown, crash),
    "the engine dies twice": (EngineDown, crash_twice),
    "the engine is up": (EngineUp, recover),
    "a late report that the engine is up": (EngineUp, deliver(lambda scene: EngineUp())),
    "a lease ends": (LeaseChanged, lease_ends),
    "a tick": (Tick, deliver(lambda scene: Tick())),
}
"""What happens, by its name in the test, and the event that it is."""


class Conformance:
    """Subclass with ``build``; pytest does the rest."""

    def build(self, setup: Setup) -> World:
        """A new instance, healthy and without calls, its first model active."""
        raise NotImplementedError

    def scene(self, setup: Setup) -> Scene:
        return Scene(self.build(setup))

    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize("happening", HAPPENINGS)
    def test_every_event_in_every_phase_ends_every_call_once(self, phase: str, happening: str) -> None:
        scene = self.scene(PHASES[phase].setup)
        PHASES[phase].enter(scene)
        before = scene.world.instance.snapshot()
        written = CODEC.encode(before)
        HAPPENINGS[happening][1](scene)
        scene.world.recover()
        scene.world.settle()
        assert_rest(scene)
        after = scene.world.instance.snapshot()
        assert CODEC.encode(before) == written, "a published snapshot has changed"
        assert after.version > before.version and after.time_s >= before.time_s

    def test_every_kind_of_event_is_fired(self) -> None:
        assert {kind for kind, _ in HAPPENINGS.values()} == set(get_args(Event))

    @pytest.mark.parametrize("phase", PHASES)
    def test_a_session_goes_on_after_every_phase(self, phase: str) -> None:
        scene = self.scene(PHASES[phase].setup)
        PHASES[phase].enter(scene)
        scene.world.recover()
        scene.world.settle()
        for turn in range(3):
            (scene.again if turn else scene.first)("goes on")
            scene.world.settle()
        assert_rest(scene)

    @pytest.mark.parametrize("phase", ["P", "D1", "SP", "D", "D_fin", "hot P", "hot D"])
    def test_a_stopped_segment_says_so_and_its_call_goes_on(self, phase: str) -> None:
        scene = self.scene(PHASES[phase].setup)
        PHASES[phase].enter(scene)
        running = forwarded(scene)
        assert running
        scene.world.command(Stop(tuple(running)))
        before = len(scene.world.steps)
        scene.world.settle()
        ends: dict[int, str] = {}
        for step in scene.world.steps[before:]:
            if isinstance(step.event, SegmentEnded):
                ends.setdefault(step.event.call_id, step.event.reason)
        assert {ends[call_id] for call_id in running} == {"stopped"}
        assert_rest(scene)

    def test_snapshots_count_submissions_and_versions(self) -> None:
        scene = self.scene(Setup())
        versions = []
        for number in range(4):
            snapshot = scene.world.instance.snapshot()
            versions.append(snapshot.version)
            assert snapshot.seen_seq == number
            scene.first(f"s{number}", model=number % 2)
        assert versions == list(range(versions[0], versions[0] + 4))
        scene.world.settle()
        assert_rest(scene)

    def test_a_snapshot_shows_queues_residency_and_lines(self) -> None:
        scene = self.scene(Setup())
        first, second = scene.world.models
        call = scene.first("a")
        last = scene.first("b", model=1)
        shown = scene.world.instance.snapshot()
        assert (shown.models[first].queued, shown.models[first].in_flight) == (0, 1)
        assert (shown.models[second].queued, shown.models[second].in_flight) == (1, 0)
        assert shown.models[second].queued_work_s > 0.0 and shown.models[second].activate_s > 0.0 == shown.models[first].activate_s
        scene.world.settle()
        lines = scene.world.instance.snapshot().lines
        assert call.key in lines and lines[last.key].tokens > 0

    def test_a_dead_engine_takes_calls_and_serves_them_when_it_is_up(self) -> None:
        scene = self.scene(Setup())
        scene.world.crash(0)
        scene.first("patient")
        scene.world.settle()
        assert not scene.world.instance.healthy() and not scene.world.instance.snapshot().healthy and scene.world.endings == []
        scene.world.recover()
        scene.world.settle()
        assert_rest(scene)

    def test_calls_that_a_dead_engine_held_wait_again_in_order_of_arrival(self) -> None:
        scene = self.scene(Setup())
        early = [scene.first(f"early{number}", prompt=8000, output=400).id for number in range(2)]
        scene.until(lambda step: set(early) <= set(step.view.models[scene.world.models[0]].running))
        late = scene.first("late", prompt=8000).id
        scene.world.crash(0)
        assert list(scene.world.steps[-1].view.models[scene.world.models[0]].waiting) == [*early, late]
        scene.world.recover()
        scene.world.settle()
        assert_rest(scene)

    def test_a_refused_call_is_admitted_later(self) -> None:
        scene = self.scene(Setup())
        scene.world.refuse_next("no free KV")
        scene.first("a")
        scene.world.settle()
        assert sum(admitted("P")(step) for step in scene.world.steps) >= 2
        assert_rest(scene)


def assert_rest(scene: Scene) -> None:
    """All calls have ended once, the books balance, no command was illegal, and the instance is idle."""
    world = scene.world
    Referee().follow(world.steps)
    cancelled = {step.event.call_id for step in world.steps if isinstance(step.event, Cancelled)}
    expected = {call_id: "failed" if call_id in cancelled else "completed" for call_id in scene.submitted}
    assert dict(world.endings) == expected
    assert max(Counter(call_id for call_id, _ in world.endings).values(), default=1) == 1, "a call ended twice"
    assert world.audit() == []
    snapshot: Any = world.instance.snapshot()
    assert snapshot.healthy and snapshot.seen_seq == len(scene.submitted)
    assert all(model.queued == model.in_flight == 0 for model in snapshot.models.values())
    assert snapshot.round_left_s == 0.0 and all(model.next_slot_s == 0.0 for model in snapshot.models.values())
