"""How both worlds lay out what instances tell: rows of rounds with their slots, of switches and of phases."""

from __future__ import annotations

from typing import Protocol

from talaria.policy.instance import RoundSummary
from talaria.report.conservation import ConservationError
from talaria.report.record import KV_DEVICE, KV_HOST, KV_MISSING, NO_MODEL, PATHS, PHASES, RunRecord

_PATH = {name: code for code, name in enumerate(PATHS)}
_PHASE = {name: code for code, name in enumerate(PHASES)}


class Switch(Protocol):
    """One logical switch or open; ``source`` is None where no model was active."""

    @property
    def source(self) -> str | None: ...
    @property
    def target(self) -> str: ...
    @property
    def started_s(self) -> float: ...
    @property
    def phases_s(self) -> tuple[float, ...]: ...
    @property
    def path(self) -> str: ...
    @property
    def coverage(self) -> float: ...
    @property
    def dirty(self) -> float: ...
    @property
    def d2d_bytes(self) -> int: ...
    @property
    def h2d_bytes(self) -> int: ...


class InstanceRows:
    """``began_s``: what the instances' clock showed when the record began. ``rounding_s``: how exact its times are."""

    def __init__(self, record: RunRecord, *, began_s: float, rounding_s: float) -> None:
        self._record = record
        self._began_s = began_s
        self._rounding_s = rounding_s
        self._model_code = {name: code for code, name in enumerate(record.models)}

    def round(self, instance: int, summary: RoundSummary, *, hot: bool) -> None:
        """A round and its slots; of a hot instance only the slots. Raises ConservationError where its times do not add up."""
        active_s, record, began_s = 0.0, self._record, self._began_s
        for slot in summary.slots:
            active_s += slot.closed_s - slot.opened_s
            record.slots.append(
                instance, summary.index, self._model_code[slot.model], slot.opened_s - began_s, slot.closed_s - began_s,
                slot.prefill_s - slot.sp_s, slot.sp_s, slot.decode_s, slot.linger_s, slot.p_admitted, slot.sp_admitted, slot.parked,
            )  # fmt: skip
        wall_s = summary.ended_s - summary.started_s
        if abs(wall_s - active_s - summary.switch_s) > self._rounding_s * (1.0 + wall_s):
            name = record.instances[instance]
            raise ConservationError(f"{name} round {summary.index}: wall {wall_s} != active {active_s} + switch {summary.switch_s}")
        record.deadline_risk += summary.at_risk
        if hot:
            return
        record.rounds.append(
            instance, summary.index, summary.started_s - began_s, wall_s, active_s, summary.switch_s, summary.predicted_s,
            len(summary.slots), sum(slot.sp_admitted for slot in summary.slots), sum(slot.parked for slot in summary.slots),
            int(summary.at_risk), int(summary.infeasible),
        )  # fmt: skip

    def switch(self, instance: int, rounds: int, switch: Switch) -> None:
        """A switch after so many closed rounds."""
        source = NO_MODEL if switch.source is None else self._model_code[switch.source]
        self._record.switches.append(
            instance, rounds, source, self._model_code[switch.target], switch.started_s - self._began_s, sum(switch.phases_s),
            *switch.phases_s, _PATH[switch.path], switch.coverage, switch.dirty, switch.d2d_bytes, switch.h2d_bytes,
        )  # fmt: skip

    def phase(self, instance: int, name: str, model: str, started_s: float, ended_s: float) -> None:
        """Where the record keeps phases."""
        if self._record.phases is not None:
            self._record.phases.append(
                instance, self._model_code[model], _PHASE[name], started_s - self._began_s, ended_s - self._began_s
            )  # fmt: skip


def kv_state(device_tokens: int, host_tokens: int, missing_tokens: int) -> int:
    """Where most of a call's reusable prefix was at its admission."""
    most = max(device_tokens, host_tokens, missing_tokens)
    if most == 0 or most == missing_tokens:
        return KV_MISSING
    return KV_DEVICE if most == device_tokens else KV_HOST
