"""What an implementation of the two faces gives to be judged: one instance in a world whose time the suite moves.

To bring another implementation under the suite, write a ``World`` for it and a test class (see ``test_simulator.py``):

    class TestMyInstance(Conformance):
        def build(self, setup: Setup) -> World:
            return MyWorld(setup)

The world around the instance does what a gateway would: it leases every completed call's line for ``setup.tau_s`` before
the slot scheduler hears that the call has ended, and never retries a call. Simulated, scaled or real time are all fine: the
suite waits for conditions, and gives up after seconds of the world's own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from talaria.policy.calls import Call
from talaria.policy.instance import Command, EngineView, Event, Instance
from talaria.policy.knobs import Knobs


@dataclass(frozen=True, slots=True)
class Setup:
    """The instance wanted: so many models, all resident but for ``max_resident_models``, the first active."""

    models: int = 2
    hot: bool = False
    session_prefill: bool = True
    hkvr: bool = True
    staging: bool = True
    inflight_kv: str = "swap"
    max_resident_models: int = 8
    tau_s: float = 1.0
    knobs: Knobs = field(default_factory=Knobs)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the slot scheduler: ``view`` is a copy of what it was given, from before its commands were carried out."""

    event: Event
    view: EngineView
    now_s: float
    commands: tuple[Command, ...]


class World(Protocol):
    """One running instance."""

    models: tuple[str, ...]
    steps: list[Step]
    """Every step so far, in order."""
    endings: list[tuple[int, str]]
    """(call id, ``completed`` or ``failed``) in the order in which clients were told."""

    @property
    def instance(self) -> Instance: ...

    def now_s(self) -> float: ...

    def submit(self, call: Call, output_tokens: int) -> None:
        """Hand ``call`` to the instance; the model will answer with exactly ``output_tokens``."""

    def command(self, command: Command) -> None:
        """Have ``command`` carried out, as if the slot scheduler had given it."""

    def cancel(self, call_id: int) -> None:
        """The client of a call that has not ended goes away."""

    def crash(self, rank: int) -> None:
        """The engine dies with all that it holds. Nothing happens where it is dead already."""

    def recover(self) -> None:
        """The engine is back, without an active model. Nothing happens where it is alive."""

    def fail_switch(self, why: str) -> None:
        """The switch or open under way does not succeed."""

    def refuse_next(self, why: str) -> None:
        """The next call that is forwarded is refused by the engine, once."""

    def deliver(self, event: Event) -> None:
        """Let the slot scheduler see ``event``, as if the engine had reported it, true or out of date."""

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until the condition holds; False if it does not within ``limit_s``, or if nothing more will happen."""

    def settle(self) -> None:
        """Let time pass until nothing more will happen by itself. Raises AssertionError where that has no end."""

    def audit(self) -> list[str]:
        """What does not balance in the books of memory once all calls have ended: locks, pins, pages."""
