"""Ways to bring an instance into each phase in which an event can meet it, by calls alone, whatever its timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import Admit, Arrived, Open, Switch, Wait
from talaria.policy.knobs import Knobs
from tests.conformance.world import Setup, Step, World

PATIENCE_S = 600.0


class Scene:
    """A world and the sessions that the suite runs in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.submitted: dict[int, Call] = {}
        self._outputs: dict[int, int] = {}
        self._last: dict[str, Call] = {}

    def first(self, session: str, *, model: int = 0, prompt: int = 2000, output: int = 50) -> Call:
        """The first call of a session."""
        key = LineKey("tenant", session, self.world.models[model], "main")
        return self._submit(Call(len(self.submitted) + 1, key, 0, self.world.now_s(), prompt, expected_output_tokens=output), output)

    def again(self, session: str, *, suffix: int = 200, output: int = 50) -> Call:
        """The session's next call: it continues the previous prompt and response."""
        previous = self._last[session]
        reusable = previous.prompt_tokens + self._outputs[previous.id]
        call = replace(
            previous, id=len(self.submitted) + 1, turn=previous.turn + 1, enqueued_s=self.world.now_s(), prompt_tokens=reusable + suffix,
            reusable_tokens=reusable, expected_output_tokens=output, continues=((previous.key.line, reusable),),
        )  # fmt: skip
        return self._submit(call, output)

    def _submit(self, call: Call, output: int) -> Call:
        self.submitted[call.id] = self._last[call.key.session] = call
        self._outputs[call.id] = output
        self.world.submit(call, output)
        return call

    def warm(self, *sessions: str, output: int = 50) -> None:
        """Let sessions make their first call on the first model and come to rest."""
        for session in sessions:
            self.first(session, output=output)
        self.world.settle()

    def until(self, condition: Callable[[Step], bool]) -> None:
        """Let time pass until the newest step fulfils ``condition``."""
        steps = self.world.steps
        reached = self.world.advance(lambda: bool(steps) and condition(steps[-1]), PATIENCE_S)
        assert reached, f"not reached; last: {steps[-1].event} {steps[-1].commands}"

    def live(self) -> list[int]:
        """Calls that have not ended, oldest first."""
        ended = {call_id for call_id, _ in self.world.endings}
        return [call_id for call_id in self.submitted if call_id not in ended]

    def running(self, call: Call) -> Callable[[Step], bool]:
        """Condition: the call has its first token and is still forwarded."""
        return lambda step: getattr(step.event, "call_id", None) == call.id and call.id in step.view.models[call.key.model].running


def commanded(*kinds: type) -> Callable[[Step], bool]:
    return lambda step: any(isinstance(command, kinds) for command in step.commands)


def admitted(phase: str) -> Callable[[Step], bool]:
    return lambda step: any(isinstance(command, Admit) and command.phase == phase for command in step.commands)


def idle(scene: Scene) -> None:
    assert scene.world.steps == []


def rest(scene: Scene) -> None:
    """Idle again, with prefixes cached."""
    scene.warm("a", "b")


def prefill(scene: Scene) -> None:
    """P is under way."""
    scene.first("a", prompt=8000)
    scene.until(admitted("P"))


def first_decode(scene: Scene, output: int = 400) -> None:
    """D₁, with work of the other model waiting for its slot."""
    call = scene.first("a", output=output)
    scene.first("other", model=1 % len(scene.world.models))
    scene.until(scene.running(call))


def session_prefill(scene: Scene) -> None:
    """An SP batch is in prefill beside calls that decode."""
    scene.warm("back")
    first_decode(scene)
    scene.again("back")
    scene.until(admitted("SP"))


def later_decode(scene: Scene) -> None:
    """D after an SP."""
    scene.warm("back")
    first_decode(scene)
    scene.until(scene.running(scene.again("back", output=400)))


def linger(scene: Scene) -> None:
    """Nothing runs; the slot stays open for the return that a live lease promises, though another model waits."""
    scene.first("a")
    scene.until(admitted("P"))
    scene.first("other", model=1)
    scene.until(lambda step: any(isinstance(command, Wait) and command.until_s is not None for command in step.commands))


def drain(scene: Scene) -> None:
    """D_fin: calls decode, and the return that has just come finds no room before the slot's end."""
    sessions = [f"back{number}" for number in range(8)]
    scene.warm(*sessions)
    first_decode(scene)
    for number, session in enumerate(sessions):
        call = scene.again(session, suffix=4000 * 2**number, output=400)
        if not any(call.id in dict(command.batch) for command in scene.world.steps[-1].commands if isinstance(command, Admit)):
            break
        scene.until(scene.running(call))
    last = scene.world.steps[-1]
    assert isinstance(last.event, Arrived) and last.view.models[call.key.model].running, "no call was left waiting beside decode"


def switching(scene: Scene) -> None:
    """A switch to a parked model is under way."""
    scene.warm("a")
    scene.first("other", model=1)
    scene.until(commanded(Switch))


def opening(scene: Scene) -> None:
    """A model is being opened; another was closed to make room."""
    scene.warm("a")
    scene.first("other", model=1)
    scene.until(commanded(Open))


def swapped(scene: Scene) -> None:
    """Another model has its slot while an in-flight call of the first is held off the device."""
    first_decode(scene, output=2000)
    scene.until(lambda step: step.view.active == scene.world.models[1] and bool(step.view.models[scene.world.models[0]].held))


def down(scene: Scene) -> None:
    """The engine died in the middle of decode."""
    first_decode(scene)
    scene.world.crash(0)


@dataclass(frozen=True, slots=True)
class Phase:
    enter: Callable[[Scene], None]
    setup: Setup = field(default_factory=Setup)


_HOT = Setup(models=1, hot=True)
PHASES: dict[str, Phase] = {
    "idle": Phase(idle),
    "rest": Phase(rest),
    "switching": Phase(switching),
    "opening": Phase(opening, Setup(max_resident_models=1)),
    "P": Phase(prefill),
    "D1": Phase(first_decode),
    "SP": Phase(session_prefill),
    "D": Phase(later_decode),
    "linger": Phase(linger),
    "D_fin": Phase(drain),
    "swapped": Phase(swapped),
    "recompute": Phase(swapped, Setup(inflight_kv="recompute")),
    "round-only": Phase(swapped, Setup(session_prefill=False, hkvr=False, staging=False)),
    "impatient": Phase(swapped, Setup(knobs=replace(Knobs(), max_wait_rounds=1, round_order="oldest", visit_idle=True))),
    "down": Phase(down),
    "hot rest": Phase(rest, _HOT),
    "hot P": Phase(prefill, _HOT),
    "hot D": Phase(first_decode, _HOT),
    "hot down": Phase(down, _HOT),
}
