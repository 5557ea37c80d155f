"""Which commands are legal on what the scheduler was shown, and which order of steps is."""

from __future__ import annotations

from collections.abc import Iterable

from talaria.policy.instance import (
    Admit,
    Cancelled,
    Close,
    EngineDown,
    FirstToken,
    ModelView,
    Open,
    Rejected,
    Resume,
    SegmentEnded,
    Stage,
    Stop,
    Switch,
    SwitchDone,
    SwitchFailed,
    Wait,
)  # fmt: skip
from talaria.policy.snapshot import Residency
from tests.conformance.world import Step

RESIDENT = (Residency.PARKED, Residency.STAGED, Residency.ACTIVE)


class Referee:
    """Follows the steps of one instance and raises AssertionError at the first command that is not legal where it stands."""

    def __init__(self) -> None:
        self._prefilling: set[int] = set()
        self.switching: str | None = None
        """The model whose switch or open is under way."""

    def follow(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._happened(step)
            if step.commands:
                assert step.view.healthy, f"commands to a dead engine: {step.commands}"
            room = step.view.capabilities.max_resident_models - sum(m.residency in RESIDENT for m in step.view.models.values())
            for command in step.commands:
                room += isinstance(command, Close)
                self._check(command, step, room)

    def _happened(self, step: Step) -> None:
        event = step.event
        if isinstance(event, FirstToken | SegmentEnded | Rejected | Cancelled):
            self._prefilling.discard(event.call_id)
        elif isinstance(event, EngineDown):
            self._prefilling.clear()
            self.switching = None
        elif isinstance(event, SwitchDone | SwitchFailed) and event.model == self.switching:
            self.switching = None

    def _check(self, command: object, step: Step, room: int) -> None:
        view = step.view
        if isinstance(command, Admit | Resume | Stop | Switch | Open | Close | Stage):
            assert self.switching is None, f"{command} while {self.switching} is being switched in"
        if isinstance(command, Admit):
            self._check_admit(command, step)
        elif isinstance(command, Resume):
            held = _active(step).held
            assert all(call_id in held and grant >= 1 for call_id, grant in command.batch), f"{command} of calls that are not held"
        elif isinstance(command, Stop):
            assert set(command.call_ids) <= set(_active(step).running), f"{command} of calls that do not run"
        elif isinstance(command, Switch | Open):
            model = view.models[command.model]
            assert command.model != view.active and not any(m.running for m in view.models.values()), f"{command} meets a busy engine"
            if isinstance(command, Open):
                assert model.residency is Residency.ABSENT and room >= 1, f"{command} without room"
            else:
                assert model.residency in (Residency.PARKED, Residency.STAGED), f"{command} of a model that is {model.residency}"
            self.switching = command.model
        elif isinstance(command, Close):
            assert view.models[command.model].residency in RESIDENT and not view.models[command.model].running, f"{command} of a busy model"
        elif isinstance(command, Stage):
            assert view.capabilities.staging and command.model != view.active and 0.0 < command.rate <= 1.0
            assert view.models[command.model].residency in (Residency.PARKED, Residency.STAGED), f"{command} of a model without an image"
        elif isinstance(command, Wait):
            assert command.until_s is None or command.until_s >= step.now_s, f"{command} for the past"

    def _check_admit(self, command: Admit, step: Step) -> None:
        model, capabilities = _active(step), step.view.capabilities
        assert not self._prefilling, f"{command} while calls {sorted(self._prefilling)} are in prefill"
        assert command.batch and command.phase in ("P", "SP")
        assert all(call_id in model.waiting and grant >= 1 for call_id, grant in command.batch), f"{command} of calls that do not wait"
        assert len(command.batch) + len(model.running) <= capabilities.max_running
        if command.phase == "SP":
            assert capabilities.session_prefill and not capabilities.hot
            for call_id, _ in command.batch:
                item = model.waiting[call_id]
                assert item.call.is_return and item.device_tokens + item.host_tokens > 0, f"call {call_id} is not eligible for SP"
        self._prefilling.update(call_id for call_id, _ in command.batch)


def _active(step: Step) -> ModelView:
    assert step.view.active is not None, f"{step.commands} without an active model"
    return step.view.models[step.view.active]
