"""What the agent makes of staging: the scheduler's wish reaches the engines, and what they say of it schedulers and routers."""

from __future__ import annotations

import pytest

from talaria.gpu.agent.host import Staged
from talaria.gpu.engine.staging import Progress
from talaria.gpu.protocol.arena import Staged as Word
from talaria.policy.instance import Stage, SwitchDone
from talaria.policy.snapshot import Residency
from tests.conformance.scenes import Scene, commanded
from tests.conformance.test_gpu import AgentWorld
from tests.conformance.world import Setup


class StagingWorld(AgentWorld):
    staging = True


def test_the_next_model_is_staged_and_routers_see_how_far() -> None:
    world = StagingWorld(Setup())
    scene = Scene(world)
    scene.first("a", output=4000)
    scene.first("b", model=1, output=4000)
    scene.until(commanded(Stage))
    first, second = world.instance.view.active, world.engines.staged().target
    assert {first, second} == set(world.models[:2])
    model = world.instance.view.models[second]
    assert (model.residency, model.coverage) == (Residency.STAGED, 0.0)
    snapshot = world.instance.snapshot()
    assert not world.instance.changed and snapshot.models[second].residency is Residency.STAGED
    world.engines.progress = Staged(second, 0.25, 4000, 1200, 100, 700)
    assert world.instance.changed
    snapshot = world.instance.snapshot()
    seen, timing = snapshot.models[second], model.timing
    assert (seen.coverage, seen.activate_s, snapshot.slack_bytes) == (0.25, timing.switch_s(0.25), 700)
    assert snapshot.models[first].coverage == 1.0 and model.coverage == 0.25
    scene.until(lambda step: isinstance(step.event, SwitchDone) and step.event.model == second)
    assert world.instance.view.models[first].residency is not Residency.ACTIVE
    assert world.instance.view.models[second].coverage == 0.0
    world.settle()


def word(clean: int, dirty: int = 0, model: str = "b") -> Word:
    return Word(model, 100, clean, dirty, 10, 100, 4.0)


def test_the_rank_that_has_least_counts_and_one_that_has_said_nothing_has_nothing() -> None:
    progress = Progress(2)
    progress.begin("a", "b")
    progress.heard("a", 0, word(80))
    assert progress.figures("a") == Staged("b", 0.0, 100, 80, 0, 10, 25.0)
    progress.heard("a", 1, word(50, dirty=30))
    assert progress.figures("a") == Staged("b", 0.5, 200, 130, 30, 20, 25.0)
    progress.heard("a", 0, Word("", 0, 0, 0, 0, 0, 0.0))
    assert progress.figures("a").coverage == 0.0, "a rank has given it up"


@pytest.mark.parametrize(("active", "message"), [("other", word(80)), ("a", word(80, model="earlier"))])
def test_words_that_come_too_late_say_nothing(active: str, message: Word) -> None:
    progress = Progress(1)
    progress.begin("a", "b")
    progress.heard(active, 0, message)
    assert progress.figures("a") == Staged("b")
    progress.heard("a", 0, word(80))
    assert progress.figures("a").coverage == 0.8 and progress.figures(None) == progress.figures("b") == Staged()
    progress.begin("a", "b")
    assert progress.figures("a").coverage == 0.8, "asked for again"
    progress.begin("a", "")
    assert progress.figures("a") == Staged()
