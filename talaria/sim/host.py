"""Around a simulated instance: what is true of its calls and curves, and whom it tells what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from talaria.policy.instance import Command, EngineView, Event, RoundSummary
from talaria.policy.timing import Timing
from talaria.sim.engine import Run
from talaria.sim.noise import Factors
from talaria.sim.variation import SwitchVariation

if TYPE_CHECKING:
    from talaria.sim.instance import SimInstance


StepLog = Callable[[str, Event, EngineView, float, list[Command]], None]
"""Takes each step of a slot scheduler: instance, event, view, time in seconds, and the commands, before they are carried out."""


class CallTruth(NamedTuple):
    """What only the simulator knows of a call: where its content lies in the prefix forest, and its real output."""

    node: int
    output_tokens: int


class Host(Protocol):
    """What an instance tells the world around it."""

    def finished(self, run: Run, instance: SimInstance) -> None:
        """The call completed; leases are granted before the scheduler hears of it."""

    def failed(self, run: Run, instance: SimInstance) -> None:
        """The call will never complete: it fits no KV pool, or its client went away."""

    def slot_opened(self, instance: SimInstance) -> None:
        """A moment at which routers want to know."""

    def health_changed(self, instance: SimInstance) -> None: ...

    def footprint_peaks(self, instance: SimInstance) -> None:
        """A slot is over: its KV is all there, the next model's weights are staged."""

    def round_closed(self, instance: SimInstance, summary: RoundSummary) -> None: ...

    def switched(self, instance: SimInstance, switch: LogicalSwitch) -> None: ...

    def phase(self, instance: SimInstance, name: str, model: str, started_s: float, ended_s: float) -> None: ...


class LogicalSwitch(NamedTuple):
    """One switch or open of the whole group: the phases of its slowest rank (SPEC §5.4).

    Ranks move the same bytes by the same path, so the slowest is the one whose copies vary most.
    """

    source: str | None
    target: str
    started_s: float
    phases_s: tuple[float, ...]
    path: str
    coverage: float
    dirty: float
    d2d_bytes: int
    h2d_bytes: int


@dataclass(frozen=True, slots=True)
class Ground:
    """Ground truth of one instance: real curves, and the variation around them."""

    timing: Mapping[str, Timing]
    prefill_factor: Factors
    decode_factor: Factors
    switch: SwitchVariation
    macro: bool = True
    call_overhead_s: float = 0.0
    """From a call's placement to its arrival at the instance."""
