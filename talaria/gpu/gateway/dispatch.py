"""The router's host: what agents say goes in, calls come out placed, and every call's books are closed once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Final

import msgspec

from talaria.gpu.config import ClusterConfig
from talaria.gpu.dialects import Problem
from talaria.gpu.gateway.agents import Agent
from talaria.gpu.gateway.calls import LiveCall
from talaria.gpu.gateway.conversation import Conversation
from talaria.gpu.gateway.door import SHED_RETRY_S, Door
from talaria.gpu.gateway.explaining import Explainer
from talaria.gpu.gateway.instances import InstanceState
from talaria.gpu.gateway.leases import LeaseBook
from talaria.gpu.gateway.lines import Line, SessionBook
from talaria.gpu.gateway.metrics import Metrics
from talaria.gpu.gateway.recording import Recording
from talaria.gpu.gateway.sessions import Session
from talaria.gpu.gateway.settings import Settings, Tenant
from talaria.gpu.protocol import agent as wire
from talaria.gpu.protocol import records
from talaria.gpu.protocol.agent import now_s
from talaria.gpu.protocol.submission import write_call
from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs
from talaria.policy.leases import Lease
from talaria.policy.router import ROUTERS, Overloaded, Routed, Router, Usage
from talaria.policy.snapshot import Capabilities, InstanceSnapshot
from talaria.report.recording import RecordingRouter

LAST_WORD_S: Final = 10.0
"""How long a call's books wait for its agent after its answer is over."""
SILENCES: Final = 2.0
"""So many times as long as a snapshot is fresh may a link say nothing: heartbeats wait for snapshots and may come late."""

_log = logging.getLogger("talaria.gateway")
_encode = msgspec.json.Encoder().encode


class Dispatcher:
    """Everything on one event loop. Calls are numbered from the time of the start, so that no two gateways share a number."""

    def __init__(self, config: ClusterConfig, settings: Settings, knobs: Knobs, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.book = SessionBook(settings.limits.session_idle_s, self._line_forgotten, self._session_over)
        self.instances: dict[str, InstanceState] = {}
        self.explainer = Explainer()
        self.leases = self._no_leases()
        self.accepted = 0
        self.outcomes: Counter[str] = Counter()
        self.door = Door()
        self.recording: Recording | None = None
        self.name = f"{config.name}-{time.time_ns():x}"
        self._cluster = config.name
        self._capabilities = {
            item.name: Capabilities(
                hot=item.pool == "hot", session_prefill=config.policy.session_prefill, max_running=item.max_running,
                max_resident_models=item.max_resident_models,
            )
            for item in config.instances
        }  # fmt: skip
        self._knobs = knobs
        self._tuned = False
        """Since the policy began: an agent that starts anew, or missed it, does not know."""
        self._router_name = config.policy.router
        self._plain: Router = ROUTERS[self._router_name](self._capabilities, knobs)
        self._router: Router | RecordingRouter = self._plain
        self._numbers = int(time.time()) * 1_000_000
        self._live: dict[int, LiveCall] = {}
        self._attempts: dict[int, LiveCall] = {}
        self._waiting: dict[int, tuple[Call, asyncio.Future[Routed]]] = {}
        self._poll_timer: asyncio.TimerHandle | None = None
        self._poll_at = 0.0
        """On the loop's clock: uvloop's timers do not say when they are due."""

    def add(self, agent: Agent) -> None:
        self.instances[agent.name] = InstanceState(agent)

    @property
    def open_calls(self) -> int:
        """Calls whose books are not closed: accepted = completed + shed + failed + open."""
        return len(self._live)

    # --- a call's life ---------------------------------------------------------------------------------------------

    def open(
        self, tenant: Tenant, session: Session, model: str, asked: Conversation, enqueued_s: float, output_tokens: int | None = None
    ) -> LiveCall:
        """Accept a call. ``output_tokens``: where its request says how many there will be. Raises Problem during a reset."""
        self.door.check()
        begun = self.book.begin(tenant.name, session.name, session.signal, model, asked, enqueued_s)
        self._numbers += 1
        call = Call(
            self._numbers, begun.line.key, begun.turn, enqueued_s, begun.prompt_tokens, begun.reusable_tokens, output_tokens,
            begun.continues, enqueued_s + self.settings.limits.call_deadline_s, False,
        )  # fmt: skip
        live = LiveCall(call.id, tenant, begun, call)
        self._live[live.id] = live
        self.accepted += 1
        self.metrics.accepted(model).inc()
        return live

    async def place(self, live: LiveCall) -> InstanceState:
        """Where the call goes, now or when it fits. Raises Problem if the overload policy sheds it."""
        live.attempts += 1
        if live.attempts > 1:
            self._numbers += 1
            live.call = replace(live.call, id=self._numbers)
            self.metrics.retried.inc()
        live.routed, live.word = None, None
        live.spoken.clear()
        decision = self._decide(live)
        if isinstance(decision, Overloaded):
            decision = await self._queued(live, decision)
        now = now_s()
        live.routed, live.placed_s = decision, now
        live.same_instance = live.begun.line.served_by == decision.instance
        self._attempts[live.call.id] = live
        self.metrics.placed(decision.instance, decision.reason).inc()
        return self.instances[decision.instance]

    def submission(self, live: LiveCall, instance: InstanceState) -> str:
        """What ``SUBMIT_HEADER`` says of the call."""
        assert live.routed is not None
        submit = wire.Submit(instance.numbers.sent(live.routed.seq), msgspec.Raw(write_call(live.call)), live.call.deadline_s)
        return _encode(submit).decode()

    def lost(self, live: LiveCall, *, arrived: bool) -> None:
        """The instance did not answer. ``arrived``: it may have had the call."""
        routed, call = live.routed, live.call
        live.routed = None
        if routed is None or self._attempts.pop(call.id, None) is None:
            return  # its agent has closed its books
        now = now_s()
        if arrived:
            self._router.ended(call, now)
        else:
            self._router.submit_failed(call, routed, now)
        self.instances[routed.instance].void(routed.seq)
        self._tell_leases()
        self._arm()

    def distrust(self, instance: InstanceState) -> None:
        """It did not take a call: no new placements before it says that it is well."""
        self._bar(instance)
        self._arm()

    async def last_word(self, live: LiveCall, wait_s: float) -> None:
        """Wait a moment for the agent's books of the call: a client that comes back at once then finds its lease."""
        if not live.spoken.is_set() and live.call.id in self._attempts:
            try:
                async with asyncio.timeout(wait_s):
                    await live.spoken.wait()
            except TimeoutError:
                pass

    def close(self, live: LiveCall, outcome: str, why: str) -> None:
        """The client's side is over. The books close with the agent's last word, or without it after a while."""
        live.answer, live.answered_s = (outcome, why), now_s()
        if live.call.id in self._attempts:
            asyncio.get_running_loop().call_later(LAST_WORD_S, self._give_up, live)
        else:
            self._finish(live)

    def _give_up(self, live: LiveCall) -> None:
        if live.id in self._live:
            if self._attempts.pop(live.call.id, None) is not None:
                self._router.ended(live.call, now_s())
                if live.routed is not None:  # its agent may have refused it unread
                    self.instances[live.routed.instance].void(live.routed.seq)
                self._tell_leases()
                self._arm()
            self._finish(live)

    def _finish(self, live: LiveCall) -> None:
        del self._live[live.id]
        self.book.ended(live.begun)
        self.outcomes[live.outcome] += 1
        self.metrics.call_ended(live)
        if self.recording is not None:
            self.recording.add(live.row())
        if _log.isEnabledFor(logging.INFO):
            key, routed = live.call.key, live.routed
            _log.info(
                "event=call id=%d tenant=%s session=%.12s line=%.12s model=%s instance=%s outcome=%s attempts=%d seconds=%.3f",
                live.id, key.tenant, key.session, key.line, key.model, routed.instance if routed else "-", live.outcome, live.attempts,
                live.answered_s - live.call.enqueued_s,
            )  # fmt: skip

    # --- the router ------------------------------------------------------------------------------------------------

    def _decide(self, live: LiveCall) -> Routed | Overloaded:
        began = time.perf_counter()
        now, call = now_s(), live.call
        explanation = self.explainer.explain(self._plain, call, now)
        decision = self._router.place(call, now)
        self.explainer.keep(live.id, live.attempts, call, explanation, decision)
        self._tell_leases()
        self._arm()
        self.metrics.place_s.observe(time.perf_counter() - began)
        return decision

    async def _queued(self, live: LiveCall, overloaded: Overloaded) -> Routed:
        if overloaded.action == "shed":
            raise _shed(overloaded)
        waiting: asyncio.Future[Routed] = asyncio.get_running_loop().create_future()
        self._waiting[live.call.id] = live.call, waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._unwanted(live.call, waiting.result())
                self._tell_leases()
            elif self._router.withdraw(live.call, now_s()):
                del self._waiting[live.call.id]
            self._arm()
            raise

    def _unwanted(self, call: Call, routed: Routed) -> None:
        """A queued call got its place when nobody waits for it any more."""
        self._router.submit_failed(call, routed, now_s())
        self.instances[routed.instance].void(routed.seq)

    def _poll(self) -> None:
        self._poll_timer = None
        for decision in self._router.poll(now_s()):
            call, waiting = self._waiting.pop(decision.call_id)
            if waiting.done():
                if isinstance(decision, Routed):
                    self._unwanted(call, decision)
            elif isinstance(decision, Routed):
                waiting.set_result(decision)
            else:
                waiting.set_exception(_shed(decision))
        self._tell_leases()
        self._arm()

    def _arm(self) -> None:
        due_s = self._router.next_poll_s()
        if due_s is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, due_s - now_s())
        if self._poll_timer is not None:
            if self._poll_at <= at:
                return
            self._poll_timer.cancel()
        self._poll_timer, self._poll_at = loop.call_at(at, self._poll), at

    def _tell_leases(self) -> set[LineKey]:
        """Pass lease changes on; returns the lines that were granted one."""
        return self.leases.changed(self._router.drain_lease_changes())

    def _no_leases(self) -> LeaseBook:
        return LeaseBook(lambda name, lease: self.instances[name].agent.send(lease))

    # --- what agents say -------------------------------------------------------------------------------------------

    def link_up(self, agent: Agent) -> None:
        _log.info("event=link_up instance=%s", agent.name)
        instance = self.instances[agent.name]
        instance.heard_s = now_s()
        instance.links += 1

    def link_down(self, agent: Agent) -> None:
        _log.warning("event=link_down instance=%s", agent.name)
        self._bar(self.instances[agent.name])
        self._arm()

    def heard(self, agent: Agent, message: wire.FromAgent) -> None:
        """Raises ValueError (CodecError, DecodeError) for what cannot be read: the link is given up then."""
        instance = self.instances[agent.name]
        instance.heard_s = now_s()
        if instance.hello is None and not isinstance(message, wire.AgentHello):
            return  # of the time before a reset
        match message:
            case wire.CallEnded():
                self._call_ended(instance, message)
            case wire.Snapshot(body):
                self._observe(instance, instance.reader.read(body))
            case wire.Beat(healthy):
                self._beat(instance, healthy)
            case wire.AgentHello():
                self._greeted(instance, message)
            case wire.Switched():
                self.metrics.switches(agent.name, message.path).inc()
                self._record(records.SwitchRow(agent.name, **msgspec.structs.asdict(message)))
            case wire.RoundClosed(body):
                if self.recording is not None:
                    self._record(records.RoundRow(agent.name, msgspec.json.decode(body)))
            case wire.Phase():
                self._record(records.PhaseRow(agent.name, **msgspec.structs.asdict(message)))
            case wire.Decision(line):
                self._record(records.DecisionLine(line.decode().rstrip("\n")))

    def watch(self) -> None:
        """Bar instances of which nothing is heard, though their link be up; to be called every second or so."""
        now = now_s()
        for instance in self.instances.values():
            if now - instance.heard_s > SILENCES * self._knobs.stale_after_s:
                if instance.agent.connected and not instance.barred:
                    self._bar(instance)
                self._place_again(instance)
        self._arm()
        self.book.expire(now)
        self.metrics.sessions.set(len(self.book))
        self.metrics.in_flight.set(self.door.inside)

    def _place_again(self, silent: InstanceState) -> None:
        """Calls that wait for its first byte wait no longer, where another instance can answer them."""
        now_s = asyncio.get_running_loop().time()
        for live in self._attempts.values():
            waiting, routed = live.unanswered, live.routed
            if waiting is None or waiting.expired() or routed is None or routed.instance != silent.agent.name:
                continue
            if any(other.healthy and other.serves(live.call.key.model) for other in self.instances.values()):
                waiting.reschedule(now_s)

    def _greeted(self, instance: InstanceState, hello: wire.AgentHello) -> None:
        instance.greeted(hello)
        if self._tuned:
            instance.agent.send(wire.Tune(_json(self._knobs)))

    def _bar(self, instance: InstanceState) -> None:
        instance.barred = True
        self._router.heartbeat(instance.agent.name, False, now_s())
        self.metrics.up(instance.agent.name).set(0)

    def _beat(self, instance: InstanceState, healthy: bool) -> None:
        """Alive, and its last snapshot still holds: which is telemetry, where we had barred it meanwhile."""
        if healthy and instance.barred and instance.snapshot is not None:
            self._observe(instance, instance.snapshot)
        else:
            self._router.heartbeat(instance.agent.name, healthy and not instance.drained, now_s())
            self._arm()

    def _observe(self, instance: InstanceState, snapshot: InstanceSnapshot) -> None:
        now, name = now_s(), instance.agent.name
        instance.snapshot, instance.barred = snapshot, False
        is_first = instance.fresh_link
        snapshot = instance.translated(snapshot)
        self._router.observe(snapshot, now)
        self._router.prepare()
        if is_first:
            self._void_lost(instance, snapshot.seen_seq)
        if not instance.taken_over:
            instance.taken_over = True
            self._take_over(instance, snapshot, now)
        instance.ready.set()
        self.metrics.up(name).set(int(instance.healthy))
        self._arm()

    def _void_lost(self, instance: InstanceState, seen_seq: int) -> None:
        """What was said of submissions that never arrived may have been lost with a link; a gap would hold up all numbers after it."""
        name = instance.agent.name
        under_way = {live.routed.seq for live in self._attempts.values() if live.routed is not None and live.routed.instance == name}
        for seq in instance.numbers.unseen(seen_seq):
            if seq not in under_way:
                instance.void(seq)

    def _take_over(self, instance: InstanceState, snapshot: InstanceSnapshot, now: float) -> None:
        """What an earlier gateway left on an instance: its leases, and the lines whose prefix is there."""
        assert instance.hello is not None
        lines = sorted(snapshot.lines.items(), key=lambda item: item[1].last_use_s)
        if not lines and not instance.hello.leases:
            return
        leases = []
        for fields, granted_s, expires_s in instance.hello.leases:
            key = LineKey(*fields)
            state = snapshot.lines.get(key)
            leases.append(
                Lease(key, snapshot.instance, 0 if state is None else state.tokens, granted_s, min(expires_s, now + self._knobs.tau_s))
            )
        self._router.adopt(snapshot.instance, tuple(leases), tuple(key for key, _ in lines), now)
        for key, state in lines:
            self.book.adopt(key, state.tokens, snapshot.instance, now)
        self._tell_leases()

    def _call_ended(self, instance: InstanceState, message: wire.CallEnded) -> None:
        live = self._attempts.pop(message.call, None)
        if live is None:
            return  # it was given up before
        now, call, name = now_s(), live.call, instance.agent.name
        if message.outcome == "completed":
            usage = Usage(message.prompt_tokens, message.device_tokens + message.host_tokens, message.output_tokens)
            self._router.completed(call, name, usage, now, self.leases.may_reserve(live.tenant, call.key))
            if call.key not in self._tell_leases():
                instance.agent.send(wire.Lease(call.key, None))
            self.book.completed(live.begun, name, message.prompt_tokens, message.output_tokens)
        else:
            self._router.ended(call, now)
            self._tell_leases()
        live.word = message
        live.spoken.set()
        if live.answer is not None:
            self._finish(live)
        self._arm()

    def _line_forgotten(self, line: Line) -> None:
        if line.served_by in self.instances:
            self.instances[line.served_by].agent.send(wire.Forget(line.key))

    def _session_over(self, tenant: str, session: str) -> None:
        self._router.session_ended(tenant, session)

    def _record(self, record: records.Record) -> None:
        if self.recording is not None:
            self.recording.add(record)

    # --- administration --------------------------------------------------------------------------------------------

    def changed(self, instance: InstanceState) -> None:
        """An administrator drained or undrained it, or closed or opened a model: the router hears of it at once."""
        if instance.snapshot is not None and instance.agent.connected and not instance.barred:
            self._observe(instance, instance.snapshot)

    def tune(self, knobs: Knobs) -> None:
        """Go on by other knobs: calls under way, leases and caches stay. Raises Problem during a reset."""
        self.door.check()
        self._knobs, self._tuned = knobs, True
        self._router.set_knobs(knobs, now_s())
        for instance in self.instances.values():
            instance.agent.send(wire.Tune(_json(knobs)))
        self._arm()

    async def reset(self, router: str, knobs: Knobs, session_prefill: bool, recording: Recording | None, wait_s: float) -> None:
        """Begin anew with a policy on all instances. Raises Problem unless all is idle and every agent is there."""
        if self._live or self.door.resetting:
            raise Problem(409, f"{len(self._live)} calls are open: a reset needs an idle gateway")
        missing = [name for name, instance in self.instances.items() if not instance.agent.connected]
        if missing:
            raise Problem(409, f"not connected: {', '.join(missing)}")
        self.door.resetting, links = True, [instance.links for instance in self.instances.values()]
        try:
            self._begin_anew(router, knobs, session_prefill, recording)
            for instance in self.instances.values():
                instance.agent.send(wire.Reset(_json(knobs), session_prefill, recording is not None))
            async with asyncio.timeout(wait_s):
                for instance in self.instances.values():
                    await instance.ready.wait()
        except TimeoutError:
            raise Problem(504, f"an instance did not begin anew within {wait_s:g} s") from None
        finally:
            self.door.resetting = False
        if links != [instance.links for instance in self.instances.values()]:
            raise Problem(502, "an instance's link broke: it may not have begun anew")

    def _begin_anew(self, router: str, knobs: Knobs, session_prefill: bool, recording: Recording | None) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None
        self._waiting.clear()
        capabilities = {name: replace(item, session_prefill=session_prefill) for name, item in self._capabilities.items()}
        self._knobs, self._tuned, self._router_name, self._capabilities = knobs, False, router, capabilities
        arguments = {"instances": capabilities, "knobs": knobs}
        self._plain = self._router = ROUTERS[router](capabilities, knobs)
        self.recording = recording
        if recording is not None:
            self._router = RecordingRouter(self._plain, recording, now_s)
            encoded = {name: CODEC.encode(value) for name, value in arguments.items()}
            slots = {name: {"knobs": CODEC.encode(knobs)} for name in self.instances}
            recording.add(records.Begin(self._cluster, now_s(), router, encoded, slots, list(self.settings.models), list(self.instances)))
        self.book = SessionBook(self.settings.limits.session_idle_s, self._line_forgotten, self._session_over)
        self.leases = self._no_leases()
        self.explainer.kept.clear()
        for instance in self.instances.values():
            instance.begin_anew()

    def stop_recording(self) -> None:
        """The reader went away: the policy goes on unrecorded."""
        self.recording = None
        self._router = self._plain


def _shed(overloaded: Overloaded) -> Problem:
    return Problem(503, f"overloaded: {overloaded.reason}", kind="overloaded", retry_after_s=SHED_RETRY_S)


def _json(value: object) -> bytes:
    return _encode(CODEC.encode(value))
