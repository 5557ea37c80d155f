"""The control plane of a simulated run: sessions, router, telemetry, and the books that prove nothing was lost.

Kernel processes: one that starts sessions, one per live session line, one for telemetry. Instances wake by alarms of their
own, so that an engine costs one kernel event per boundary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from simpy.events import Event, Timeout

from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import RoundSummary
from talaria.policy.router import Overloaded, Routed, Router, Usage
from talaria.policy.snapshot import InstanceSnapshot
from talaria.report.conservation import ConservationError
from talaria.report.record import (
    FLAG_AVOIDABLE,
    FLAG_LEASE_HIT,
    FLAG_OPEN,
    FLAG_RESIDENCY_HIT,
    FLAG_RETURN,
    FLAG_SAME_INSTANCE,
    FLAG_SP,
    FLAG_WARMUP,
    KV_MISSING,
    NO_INSTANCE,
    OUTCOMES,
    REASONS,
    RunRecord,
)  # fmt: skip
from talaria.report.recording import RecordingRouter
from talaria.report.rows import InstanceRows, kv_state
from talaria.sim.engine import Run
from talaria.sim.host import CallTruth, LogicalSwitch
from talaria.sim.instance import SimInstance
from talaria.sim.kernel import Alarm, Kernel
from talaria.sim.prefixes import PromptBook
from talaria.sim.scenario import Telemetry
from talaria.workload.session import Session, TraceCall

_COMPLETED, _SHED, _FAILED = (OUTCOMES.index(name) for name in ("completed", "shed", "failed"))
_REASON = {name: code for code, name in enumerate(REASONS)}
ROUNDING_S = 1e-6


class _Live:
    """A session under way."""

    __slots__ = ("aborted", "done", "instance_of", "issued", "left", "line_number", "lines", "nodes", "number", "served_by", "session")

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self.session = session
        self.left = len(session.calls)
        self.nodes: dict[int, int] = {}
        """Prefix nodes by call index; it is the ``PromptBook`` that enters them."""
        self.issued: set[int] = set()
        self.instance_of: dict[str, int] = {}
        """Where each line's last call was served."""
        self.served_by: dict[int, None] = {}
        """Instances that may hold KV of the session."""
        self.aborted = False
        self.done: dict[int, Event] = {}
        """Ends of the calls that another line waits for."""
        self.lines: dict[str, list[int]] = {}
        for index, call in enumerate(session.calls):
            self.lines.setdefault(call.line, []).append(index)
        self.line_number = {line: number for number, line in enumerate(self.lines)}


class Cluster:
    """Runs a schedule of sessions to its end against one router and its instances."""

    def __init__(
        self, env: Kernel, router: Router | RecordingRouter, record: RunRecord, prompts: PromptBook, *, pool: int | None,
        gap_cap_s: float | None, telemetry: Telemetry, warmup_s: float,
    ) -> None:  # fmt: skip
        self.truth: dict[int, CallTruth] = {}
        self.finished_all = env.event()
        self._env = env
        self._router = router
        self._record = record
        self._rows = InstanceRows(record, began_s=0.0, rounding_s=ROUNDING_S)
        self._prompts = prompts
        self._pool = pool
        self._gap_cap_s = gap_cap_s
        self._telemetry = telemetry
        self._warmup_s = warmup_s
        self._instances: list[SimInstance] = []
        self._by_name: dict[str, SimInstance] = {}
        self._model_code = {name: code for code, name in enumerate(record.models)}
        self._calls: dict[int, tuple[_Live, int, Routed | None]] = {}
        self._queued: dict[int, tuple[Call, Event]] = {}
        self._place_of_pool: Event | None = None
        self._live = 0
        self._issued = 0
        self._ended = 0
        self._started_sessions = 0
        self._no_more_sessions = False
        self._poll_alarm: Alarm | None = None
        self._quiet: Event | None = None

    @property
    def watches_phases(self) -> bool:
        return self._record.phases is not None

    def run(self, instances: Sequence[SimInstance], schedule: Iterable[tuple[float, Session]]) -> None:
        """Simulate until every session has ended; raises ConservationError if a sum does not hold then."""
        self._instances = list(instances)
        self._by_name = {instance.id: instance for instance in instances}
        for instance in self._instances:
            self._observe(instance.snapshot())
        self._env.process(self._start_sessions(schedule))
        self._env.process(self._heartbeats())
        self._env.run(until=self.finished_all)
        self._record.makespan_s = self._env.now
        self._record.events = self._env.count_events()
        if self._issued != self._ended or self._calls or self._queued:
            raise ConservationError(f"{self._issued} calls issued, {self._ended} ended, {len(self._calls)} open")

    # --- sessions --------------------------------------------------------------------------------------------------

    def _start_sessions(self, schedule: Iterable[tuple[float, Session]]) -> Generator[Event, Any, None]:
        env = self._env
        for start_s, session in schedule:
            if start_s > env.now:
                yield Timeout(env, start_s - env.now)
            if self._pool is not None and self._live >= self._pool:
                self._place_of_pool = env.event()
                yield self._place_of_pool
            live = _Live(self._started_sessions, session)
            self._started_sessions += 1
            self._live += 1
            if self._record.session_names is not None:
                self._record.session_names.append(session.id)
            if len(live.lines) > 1:
                for call in session.calls:
                    for other in call.waits_for:
                        if session.calls[other].line != call.line and other not in live.done:
                            live.done[other] = env.event()
            for indices in live.lines.values():
                env.process(self._line(live, indices))
        self._no_more_sessions = True
        if self._live == 0:
            self.finished_all.succeed()

    def _line(self, live: _Live, indices: Sequence[int]) -> Generator[Event, Any, None]:
        """One chain of calls, closed loop: each is released its gap after the last call that it waits for."""
        env, calls, cap_s = self._env, live.session.calls, self._gap_cap_s
        for index in indices:
            call = calls[index]
            for other in call.waits_for:
                done = live.done.get(other)
                if done is not None and not done.processed:
                    yield done
            if live.aborted:
                break
            gap_s = call.gap_s if cap_s is None or call.gap_s < cap_s else cap_s
            if gap_s > 0.0:
                yield Timeout(env, gap_s)
            if live.aborted:
                break
            yield self._release(live, index)
            if live.aborted:
                break
        if live.aborted:
            self._give_up(live, indices)

    def _give_up(self, live: _Live, indices: Sequence[int]) -> None:
        """The agent got an error: what it had still planned on this line is shed without being tried."""
        for index in indices:
            if index not in live.issued:
                live.issued.add(index)
                self._issued += 1
                self._row_unserved(live, index, self._env.now, _SHED)
                self._call_ended(live, index)

    def _release(self, live: _Live, index: int) -> Event:
        trace, now_s = live.session.calls[index], self._env.now
        if self._quiet is not None:
            self._end_quiet(self._quiet)
        self._issued += 1
        call_id = self._issued
        live.issued.add(index)
        node = self._prompts.locate(live.session, index, live.nodes)
        self.truth[call_id] = CallTruth(node, trace.output_tokens)
        key = LineKey(live.session.tenant, live.session.id, trace.model, trace.line)
        continues = () if trace.reuse_of is None else ((live.session.calls[trace.reuse_of].line, trace.reuse_tokens),)
        call = Call(call_id, key, trace.turn, now_s, trace.prompt_tokens, trace.reuse_tokens, trace.output_tokens, continues)
        decision = self._router.place(call, now_s)
        if isinstance(decision, Routed):
            return self._submit(call, live, index, decision)
        gate = self._env.event()
        self._calls[call_id] = (live, index, None)
        self._queued[call_id] = (call, gate)
        self._overloaded(decision)
        self._arm_poll()
        return gate

    def _submit(self, call: Call, live: _Live, index: int, routed: Routed) -> Event:
        instance = self._by_name[routed.instance]
        self._calls[call.id] = (live, index, routed)
        done = instance.submit(call)
        self._tell_leases()  # after the return is there: a slot that lingers for it must not close in its face
        return done

    def _overloaded(self, decision: Overloaded | Routed) -> None:
        """Act on a decision about a call that had no place: it waits on, goes to its instance at last, or is shed."""
        call, gate = self._queued[decision.call_id]
        live, index, _ = self._calls[call.id]
        if isinstance(decision, Routed):
            del self._queued[call.id]
            done = self._submit(call, live, index, decision)
            assert done.callbacks is not None
            done.callbacks.append(gate.trigger)
        elif decision.action == "shed":
            del self._queued[call.id], self._calls[call.id], self.truth[call.id]
            live.aborted = True
            self._row_unserved(live, index, call.enqueued_s, _SHED)
            self._call_ended(live, index)
            gate.succeed()

    def _arm_poll(self) -> None:
        """The router's own queue has deadlines: come back when the next one is due."""
        due_s = self._router.next_poll_s()
        if due_s is not None and self._queued:
            self._poll_alarm = self._env.alarm(max(0.0, due_s - self._env.now), self._on_poll_alarm)

    def _on_poll_alarm(self, alarm: Alarm) -> None:
        if alarm is self._poll_alarm:
            self._poll()

    def _poll(self) -> None:
        for decision in self._router.poll(self._env.now):
            self._overloaded(decision)
        self._tell_leases()
        self._arm_poll()

    def _tell_leases(self) -> None:
        for name, key, expires_s in self._router.drain_lease_changes():
            self._by_name[name].lease_changed(key, expires_s)

    # --- what instances tell ---------------------------------------------------------------------------------------

    def finished(self, run: Run, instance: SimInstance) -> None:
        call = run.view.call
        usage = Usage(call.prompt_tokens, run.device_tokens + run.host_tokens, run.output_tokens)
        self._router.completed(call, instance.id, usage, self._env.now)
        self._tell_leases()
        live, index, routed = self._calls.pop(call.id)
        self._row_served(live, index, run, instance, routed, _COMPLETED)
        self._close_call(run, live, index)

    def failed(self, run: Run, instance: SimInstance) -> None:
        call = run.view.call
        self._router.ended(call, self._env.now)
        self._tell_leases()
        live, index, routed = self._calls.pop(call.id)
        live.aborted = True
        self._row_served(live, index, run, instance, routed, _FAILED)
        self._close_call(run, live, index)

    def _close_call(self, run: Run, live: _Live, index: int) -> None:
        del self.truth[run.view.call.id]
        self._call_ended(live, index)
        run.done.succeed()

    def _call_ended(self, live: _Live, index: int) -> None:
        self._ended += 1
        live.left -= 1
        done = live.done.get(index)
        if done is not None:
            done.succeed()
        if live.left == 0:
            self._session_ended(live)

    def _session_ended(self, live: _Live) -> None:
        session = live.session
        self._router.session_ended(session.tenant, session.id)
        self._tell_leases()
        for key in {LineKey(session.tenant, session.id, call.model, call.line): None for call in session.calls}:
            for index in live.served_by:
                self._instances[index].forget(key)
        self._prompts.forget(live.nodes.values())
        self._live -= 1
        place, self._place_of_pool = self._place_of_pool, None
        if place is not None:
            place.succeed()
        if self._live == 0 and self._no_more_sessions:
            self.finished_all.succeed()

    def slot_opened(self, instance: SimInstance) -> None:
        if self._env.now - instance.published_s >= self._telemetry.min_interval_s:
            self._publish(instance)

    def footprint_peaks(self, instance: SimInstance) -> None:
        if self._record.hbm_samples is not None and instance.view.active is not None:
            self._record.hbm_samples.append(instance.index, self._env.now, *instance.memory.footprint())

    def health_changed(self, instance: SimInstance) -> None:
        self._publish(instance)

    def _publish(self, instance: SimInstance) -> None:
        """A snapshot leaves the instance now and reaches the router after the telemetry delay."""
        self.footprint_peaks(instance)
        self._env.alarm(self._telemetry.delay_s, self._on_snapshot, instance.snapshot())

    def _on_snapshot(self, alarm: Alarm) -> None:
        self._observe(alarm.value)

    def _observe(self, snapshot: InstanceSnapshot) -> None:
        self._router.observe(snapshot, self._env.now)
        if self._queued:
            self._poll()

    def _heartbeats(self) -> Generator[Event, Any, None]:
        """Between slots: what has changed since its last snapshot is published, what has not is only known to be alive.

        Nothing beats while nothing happens anywhere; the next call finds the beats that it would have heard.
        """
        heartbeat_s = self._telemetry.heartbeat_s
        while True:
            yield Timeout(self._env, heartbeat_s)
            for instance in self._instances:
                if self._env.now - instance.published_s < 0.5 * heartbeat_s:
                    continue
                if instance.changed:
                    self._publish(instance)
                else:
                    self._beat(instance)
            if not any(instance.changed or instance.runs for instance in self._instances):
                self._quiet = self._env.event()
                yield self._quiet

    def _beat(self, instance: SimInstance) -> None:
        self._router.heartbeat(instance.id, instance.healthy(), self._env.now)

    def _end_quiet(self, quiet: Event) -> None:
        self._quiet = None
        quiet.succeed()
        for instance in self._instances:
            self._beat(instance)

    # --- rows ------------------------------------------------------------------------------------------------------

    def _row_served(self, live: _Live, index: int, run: Run, instance: SimInstance, routed: Routed | None, outcome: int) -> None:
        assert routed is not None
        call, trace, now_s = run.view.call, live.session.calls[index], self._env.now
        enqueued_s = call.enqueued_s
        cached = run.device_tokens + run.host_tokens
        if outcome == _COMPLETED and cached + run.lost_tokens + run.new_tokens != call.prompt_tokens:
            raise ConservationError(f"call {call.id}: device + host + recomputed + new != {call.prompt_tokens} prompt tokens")
        flags = self._flags(live, trace, run, instance, routed)
        found = kv_state(run.device_tokens, run.host_tokens, run.lost_tokens)
        live.instance_of[trace.line] = instance.index
        live.served_by[instance.index] = None
        admitted_s = run.admitted_s if run.admitted_s >= 0.0 else now_s
        first_s = run.first_token_s if run.first_token_s >= 0.0 else now_s
        self._record.calls.append(
            live.number, live.line_number[trace.line], min(trace.turn, 65535), self._model_code[trace.model], instance.index, outcome,
            _REASON[routed.reason], flags, min(run.parked, 255), min(run.rounds_waited, 255), found, enqueued_s,
            run.placed_s - enqueued_s, admitted_s - enqueued_s, first_s - enqueued_s, now_s - enqueued_s, call.prompt_tokens,
            run.device_tokens, run.host_tokens, run.lost_tokens, run.output_tokens,
        )  # fmt: skip

    def _flags(self, live: _Live, trace: TraceCall, run: Run, instance: SimInstance, routed: Routed) -> int:
        flags = FLAG_RETURN if trace.turn > 0 else 0
        if routed.residency_hit:
            flags |= FLAG_RESIDENCY_HIT
        if routed.opens:
            flags |= FLAG_OPEN
        if routed.avoidable:
            flags |= FLAG_AVOIDABLE
        if live.instance_of.get(trace.line) == instance.index:
            flags |= FLAG_SAME_INSTANCE
        if run.by_sp:
            flags |= FLAG_SP
        if routed.reason == "lease":
            flags |= FLAG_LEASE_HIT
        if run.view.call.enqueued_s < self._warmup_s:
            flags |= FLAG_WARMUP
        return flags

    def _row_unserved(self, live: _Live, index: int, enqueued_s: float, outcome: int) -> None:
        """A call that no instance ever had."""
        trace, waited_s = live.session.calls[index], self._env.now - enqueued_s
        flags = (FLAG_RETURN if trace.turn > 0 else 0) | (FLAG_WARMUP if enqueued_s < self._warmup_s else 0)
        self._record.calls.append(
            live.number, live.line_number[trace.line], min(trace.turn, 65535), self._model_code[trace.model], NO_INSTANCE, outcome,
            _REASON["queue"], flags, 0, 0, KV_MISSING, enqueued_s, waited_s, waited_s, waited_s, waited_s, trace.prompt_tokens, 0, 0, 0, 0,
        )  # fmt: skip

    def round_closed(self, instance: SimInstance, summary: RoundSummary) -> None:
        self._rows.round(instance.index, summary, hot=instance.capabilities.hot)

    def switched(self, instance: SimInstance, switch: LogicalSwitch) -> None:
        self._rows.switch(instance.index, instance.rounds, switch)

    def phase(self, instance: SimInstance, name: str, model: str, started_s: float, ended_s: float) -> None:
        self._rows.phase(instance.index, name, model, started_s, ended_s)
