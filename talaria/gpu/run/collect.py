"""A run record from two sides: what the client saw of each call, and what the gateway recorded of it and of its instances.

Enqueue, first token and end are the client's, placement and admission the gateway's and the agents'. Times count from the
recording's beginning.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from talaria.gpu.protocol import records
from talaria.gpu.protocol.agent import now_s
from talaria.gpu.run.replay import Sent
from talaria.policy.codec import CODEC
from talaria.policy.instance import RoundSummary
from talaria.policy.snapshot import Capabilities
from talaria.report.conservation import ConservationError
from talaria.report.declog import DecisionLog
from talaria.report.record import (
    FLAG_AVOIDABLE,
    FLAG_LEASE_HIT,
    FLAG_OPEN,
    FLAG_RESIDENCY_HIT,
    FLAG_RETURN,
    FLAG_SAME_INSTANCE,
    FLAG_SP,
    KV_MISSING,
    NO_INSTANCE,
    OUTCOMES,
    REASONS,
    RunRecord,
)
from talaria.report.rows import InstanceRows, kv_state
from talaria.workload.session import Session, TraceCall

SAME_CLOCK_S = 0.25
"""Clocks that differ by less are taken for one; the delivery of a message lies between them at least."""
ROUNDING_S = 1e-3


class Collector:
    """Fills ``record``; ``log`` gets the decisions. ``take`` every record of the gateway, ``sent`` every call of the replay."""

    def __init__(self, record: RunRecord, begin: records.Begin, log: DecisionLog) -> None:
        self._record, self._log = record, log
        self._gateway_began_s = begin.now_s
        here_s = now_s()
        self._client_began_s = begin.now_s if abs(here_s - begin.now_s) < SAME_CLOCK_S else here_s
        capabilities: dict[str, Capabilities] = CODEC.decode(begin.router_arguments["instances"])
        self._hot = {name for name, can in capabilities.items() if can.hot}
        self._model_code = {name: code for code, name in enumerate(record.models)}
        self._instance_code = {name: code for code, name in enumerate(record.instances)}
        self._halves: dict[int, records.CallRow | tuple[Session, Sent]] = {}
        """Calls of which one side has reported, by the gateway's number."""
        self._served_by: dict[tuple[int, int], int] = {}
        """Where each line's last call was served."""
        self._rounds: dict[str, int] = {}
        self._instance_rows = InstanceRows(record, began_s=begin.now_s, rounding_s=ROUNDING_S)
        self._issued = self._rows = 0
        self.news = asyncio.Event()
        """Set when the gateway has reported a call."""
        self.wrong: Counter[str] = Counter()
        """What calls were that did not come out as the trace says, and how many."""

    # --- the client's side -------------------------------------------------------------------------------------------

    def sent(self, session: Session, sent: Sent) -> None:
        """A call has ended for the client, or was given up."""
        self._issued += 1
        names = self._record.session_names
        if names is not None:
            names.extend("" for _ in range(sent.session + 1 - len(names)))
            names[sent.session] = session.id
        if sent.answer is not None and sent.answer.outcome != "completed":
            self.wrong[f"{sent.answer.outcome}: {sent.answer.why[:120]}"] += 1
        number = None if sent.answer is None else sent.answer.number
        if number is None:
            self._row_unserved(session, sent, "shed" if sent.answer is None else sent.answer.outcome)
            return
        half = self._halves.pop(number, None)
        if isinstance(half, records.CallRow):
            self._row(session, sent, half)
        else:
            self._halves[number] = (session, sent)

    @property
    def open_calls(self) -> int:
        """Calls that the client has seen end and the gateway has not reported yet."""
        return sum(1 for half in self._halves.values() if not isinstance(half, records.CallRow))

    def finish(self) -> None:
        """Everything is in. Raises ConservationError if a call was lost, or reported without having been sent."""
        if self._halves or self._rows != self._issued:
            strange = len(self._halves) - self.open_calls
            raise ConservationError(
                f"{self._issued} calls sent, {self._rows} reported by both sides, {self.open_calls} by the client alone, {strange} by the "
                "gateway alone (does somebody else use it?)"
            )

    # --- the gateway's side ------------------------------------------------------------------------------------------

    def take(self, item: records.Record) -> None:
        match item:
            case records.DecisionLine():
                self._log.line(item.line)
            case records.CallRow():
                self.news.set()
                half = self._halves.pop(item.call, None)
                if isinstance(half, tuple):
                    self._row(*half, item)
                else:
                    self._halves[item.call] = item
            case records.RoundRow():
                summary: RoundSummary = CODEC.decode(item.round)
                self._rounds[item.instance] = summary.index + 1
                self._instance_rows.round(self._instance_code[item.instance], summary, hot=item.instance in self._hot)
            case records.SwitchRow():
                self._instance_rows.switch(self._instance_code[item.instance], self._rounds.get(item.instance, 0), item)
            case records.PhaseRow():
                self._instance_rows.phase(self._instance_code[item.instance], item.name, item.model, item.started_s, item.ended_s)
            case records.Broken():
                raise ConservationError(f"the recording broke off: {item.why}")
            case records.Begin():
                raise ConservationError("the gateway was reset by somebody else")

    # --- rows ------------------------------------------------------------------------------------------------------

    def _row(self, session: Session, sent: Sent, row: records.CallRow) -> None:
        """A call that both sides know."""
        trace, answer = session.calls[sent.index], sent.answer
        assert answer is not None
        if row.instance is None:
            self._row_unserved(session, sent, row.outcome)
            return
        enqueued_s = sent.enqueued_s - self._client_began_s
        ended_s = answer.ended_s - self._client_began_s - enqueued_s
        first_s = answer.first_token_s - self._client_began_s - enqueued_s if answer.first_token_s >= 0.0 else ended_s
        placed_s, admitted_s = (max(0.0, self._at(at) - enqueued_s) if at >= 0.0 else ended_s for at in (row.placed_s, row.admitted_s))
        outcome = answer.outcome if row.outcome == "completed" else row.outcome
        if outcome == "completed":
            self._check(trace, sent, row)
        code = self._instance_code[row.instance]
        flags = self._flags(trace, sent, row, code)
        found = kv_state(row.device_tokens, row.host_tokens, row.recomputed_tokens)
        self._served_by[sent.session, sent.line] = code
        self._append(
            sent, trace, code, outcome, row.reason, flags, min(row.parked, 255), min(row.rounds_waited, 255), found, enqueued_s,
            placed_s, admitted_s, first_s, ended_s, row.prompt_tokens, row.device_tokens, row.host_tokens, row.recomputed_tokens,
            row.output_tokens,
        )  # fmt: skip

    def _check(self, trace: TraceCall, sent: Sent, row: records.CallRow) -> None:
        """A completed call: tokens add up, and are those of the trace."""
        if row.device_tokens + row.host_tokens + row.recomputed_tokens > row.prompt_tokens:
            raise ConservationError(f"call {row.call}: device + host + recomputed > {row.prompt_tokens} prompt tokens")
        for what, expected, got in (
            ("prompt tokens", trace.prompt_tokens, row.prompt_tokens),
            ("output tokens", trace.output_tokens, row.output_tokens),
            ("tokens received", trace.output_tokens, len(sent.answer.output) if sent.answer else 0),
        ):
            if expected != got:
                self.wrong[f"completed with other {what} than the trace has"] += 1

    def _flags(self, trace: TraceCall, sent: Sent, row: records.CallRow, instance: int) -> int:
        known = {
            FLAG_RETURN: trace.turn > 0, FLAG_RESIDENCY_HIT: row.residency_hit, FLAG_OPEN: row.opens, FLAG_AVOIDABLE: row.avoidable,
            FLAG_SAME_INSTANCE: self._served_by.get((sent.session, sent.line)) == instance, FLAG_SP: row.by_sp,
            FLAG_LEASE_HIT: row.lease_hit,
        }  # fmt: skip
        return sum(flag for flag, is_set in known.items() if is_set)

    def _row_unserved(self, session: Session, sent: Sent, outcome: str) -> None:
        """A call that no instance ever had."""
        trace = session.calls[sent.index]
        enqueued_s = sent.enqueued_s - self._client_began_s
        ended_s = 0.0 if sent.answer is None else sent.answer.ended_s - self._client_began_s - enqueued_s
        self._append(
            sent, trace, NO_INSTANCE, outcome, "queue", FLAG_RETURN if trace.turn > 0 else 0, 0, 0, KV_MISSING, enqueued_s,
            ended_s, ended_s, ended_s, ended_s, trace.prompt_tokens, 0, 0, 0, 0,
        )  # fmt: skip

    def _append(self, sent: Sent, trace: TraceCall, instance: int, outcome: str, reason: str, *values: Any) -> None:
        """``values`` begin with the flags."""
        self._rows += 1
        record = self._record
        record.calls.append(
            sent.session, sent.line, min(trace.turn, 65535), self._model_code[trace.model], instance, OUTCOMES.index(outcome),
            REASONS.index(reason), *values,
        )  # fmt: skip
        enqueued_s, ended_s = values[4], values[8]
        record.makespan_s = max(record.makespan_s, enqueued_s + ended_s)

    def _at(self, time_s: float) -> float:
        """A time of the gateway's or an agent's, from the beginning."""
        return time_s - self._gateway_began_s
