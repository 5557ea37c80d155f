"""One TP group of real engines: both faces of an instance over what the engines report.

The slot scheduler decides, this executes: admission is a grant to a call that its engine holds, a switch parks one engine and
activates another. The view is kept current in place, as in the simulator; nothing here waits, reads a socket or a clock of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace

from talaria.gpu.agent.alarm import Alarm
from talaria.gpu.agent.calls import AgentCall, Client
from talaria.gpu.agent.decode import DecodeClock
from talaria.gpu.agent.group import MOST_ATTEMPTS, Group
from talaria.gpu.agent.host import Engines, Host, Sizes, Staged
from talaria.gpu.agent.leases import Leases
from talaria.gpu.agent.memory import PrefixMemory
from talaria.gpu.agent.seen import SeenSubmissions
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.protocol.engine import Drop, Ended, FromEngine, Grant, Held, Hello, Progress, call_number
from talaria.gpu.protocol.engine import Stop as StopSegment
from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import (
    Admit,
    Arrived,
    CallView,
    Cancelled,
    Close,
    Command,
    EngineView,
    Event,
    FirstToken,
    ModelView,
    Open,
    Rejected,
    Report,
    Resume,
    RoundSummary,
    SegmentEnded,
    Stage,
    Stop,
    Switch,
    Tick,
    Unstage,
    Wait,
)  # fmt: skip
from talaria.policy.knobs import Knobs
from talaria.policy.phases import PhaseWatch
from talaria.policy.predict import Predictor
from talaria.policy.slots import SlotScheduler
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, ModelSnapshot, Residency
from talaria.policy.timing import Timing

BROKEN_OFF_S = 5.0
"""How long a connection may be broken before its engine is known to have died."""
STALE_S = 0.1
"""As above where the engine did not have the call yet: it may have closed an idle connection in that moment."""
UNKNOWN_TOKENS = 1 << 30
_log = logging.getLogger("talaria.agent")


class AgentInstance:
    """Implements ``policy.instance.Instance``, but for submissions, which their gateway has numbered, and hosts one ``SlotScheduler``."""

    def __init__(
        self, name: str, capabilities: Capabilities, engines: Engines, beliefs: dict[str, Timing], sizes: Sizes, knobs: Knobs, host: Host,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.id = name
        self.runs: dict[int, AgentCall] = {}
        """Calls that have not had their last word, by id."""
        self.published_s = 0.0
        self._changed, self._staged_shown = True, Staged()  # since the last snapshot, and in it
        self._engines = engines
        self._beliefs = beliefs
        self._sizes = sizes
        self._host = host
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox: deque[Event] = deque()
        self._stepping = False
        self.alarm = Alarm(clock, lambda: self.happened(Tick()))
        self._version = 0
        self.heard_s: dict[str, float] = {}
        self.limits: dict[str, Hello] = {}
        self.leases = Leases(self)
        self.group = Group(self, engines, host, sizes)
        self._begin(knobs, capabilities)

    def _begin(self, knobs: Knobs, capabilities: Capabilities) -> None:
        """A fresh scheduler and empty books, over the engines as they are."""
        self.capabilities, self.knobs = capabilities, knobs
        self.rounds = self.deadline_risk = 0
        self.seen = SeenSubmissions()
        self.view = EngineView(capabilities, {name: ModelView(timing, Residency.ABSENT) for name, timing in self._beliefs.items()})
        self.view.hbm_capacity_bytes = self._sizes.hbm_capacity_bytes
        self._scheduler = SlotScheduler(knobs)
        self._predictor = Predictor(self._beliefs, knobs.ewma_alpha)
        self.decode = DecodeClock()
        self.memory = PrefixMemory(self._engines, self.view, self.runs, self.limits)
        self._phases = PhaseWatch(self._host.phase, self.clock())
        self.group.forget_wishes()
        self.group.show_residency()

    # --- the router's face -----------------------------------------------------------------------------------------

    def submit(self, call: Call, client: Client, seq: int) -> AgentCall:
        """Take submission ``seq``. The scheduler hears of it when its engine has rendered it, at once where there is none to do so."""
        run = AgentCall(CallView(call, self.clock()), client, seq)
        run.arrived_round = self.rounds
        self.runs[call.id] = run
        if self._engines.alive(run.model):
            self.post(run)
        elif self._scheduler.sits_out(run.model, self.view, self.clock()) and (why := self._engines.refusal(run.model)) is not None:
            self.end_early(run, 502, why)  # not 503: that would speak of the whole instance
        else:
            self.arrive(run)
        return run

    def healthy(self) -> bool:
        return self.view.healthy

    @property
    def changed(self) -> bool:
        """Since the last snapshot, which was made at ``published_s``."""
        return self._changed or self.group.staged() != self._staged_shown

    def lease_changed(self, key: LineKey, expires_s: float | None) -> None:
        self.leases.changed(key, expires_s)

    def most_prompt_tokens(self) -> dict[str, int]:
        """By model: the longest prompt that can be served; an engine that was never up has not said."""
        return {name: self.memory.most_prompt_tokens(name) if name in self.limits else UNKNOWN_TOKENS for name in self.view.models}

    def forget(self, key: LineKey) -> None:
        """The session has ended: its line is of no interest any more, its cached KV lives until evicted."""
        self.memory.lines.forget(key)

    def snapshot(self) -> InstanceSnapshot:
        now_s = self.clock()
        self.memory.doubt_lines()
        staged = self._staged_shown = self.group.staged()
        self._version += 1
        slots, round_left_s, load_s = self._scheduler.outlook(self.view, now_s)
        models = {name: self._model_snapshot(name, model, *slots[name]) for name, model in self.view.models.items()}
        self._changed = False
        self.published_s = now_s
        used_bytes = 0 if self.view.active is None else self._sizes.weight_bytes[self.view.active]
        return InstanceSnapshot(
            instance=self.id, version=self._version, time_s=now_s, seen_seq=self.seen.last, healthy=self.view.healthy,
            capabilities=self.capabilities, models=models, lines=self.memory.lines.states(), round_left_s=round_left_s,
            round_load_s=load_s, deadline_risk=self.deadline_risk, hbm_used_bytes=used_bytes,
            hbm_capacity_bytes=self._sizes.hbm_capacity_bytes, slack_bytes=staged.slack_bytes, host_kv_bytes=self.memory.host_kv().used,
            host_weight_bytes=self._sizes.host_weight_bytes,
        )  # fmt: skip

    def _model_snapshot(self, name: str, model: ModelView, next_slot_s: float, queued_work_s: float) -> ModelSnapshot:
        timing, active = model.timing, name == self.view.active
        absent = model.residency is Residency.ABSENT
        coverage = 1.0 if active else model.coverage
        activate_s = 0.0 if active else timing.open_s if absent else timing.switch_s(coverage)
        free_tokens = 0 if absent else self.memory.free_tokens(name) if active else self.limits[name].kv_tokens
        return ModelSnapshot(
            model.residency, coverage, len(model.waiting), len(model.running) + len(model.held), queued_work_s, next_slot_s,
            activate_s, free_tokens, self._sizes.weight_bytes[name], timing,
        )  # fmt: skip

    # --- events and commands ---------------------------------------------------------------------------------------

    def happened(self, event: Event) -> None:
        """Give ``event`` to the scheduler and carry out what it commands; events that follow at once wait their turn."""
        if self._stepping:
            self._inbox.append(event)
            return
        self._stepping = self._changed = True
        view, now_s = self.view, self.clock()
        try:
            while True:
                self.memory.refresh_view()
                self.group.staged()
                commands = self._scheduler.step(event, view, now_s)
                self._host.stepped(event, view, now_s, commands)
                until_s = None
                for command in commands:
                    if type(command) is Wait:
                        until_s = command.until_s
                    else:
                        self._execute(command)
                self.alarm.set(until_s)
                self._phases.see(self._scheduler.phase(self.view), self.group.target or self.view.active, self.clock())
                if not self._inbox:
                    break
                event = self._inbox.popleft()
        finally:
            self._stepping = False
        self.group.do_asked()

    def _execute(self, command: Command) -> None:
        if type(command) is Admit:
            for call_id, grant in command.batch:
                self._admit(self.runs[call_id], grant, by_sp=command.phase == "SP")
        elif type(command) is Resume:
            for call_id, grant in command.batch:
                self._resume(self.runs[call_id], grant)
        elif type(command) is Switch:
            self.group.switch_to(command.model)
        elif type(command) is Close:
            self.group.close(command.model)
        elif type(command) is Open:
            self.group.open(command.model)
        elif type(command) is Report:
            self._report(command.round)
        elif type(command) is Stage:
            self.group.stage(command.model, command.rate)
        elif type(command) is Unstage:
            self.group.unstage(command.model)
        elif type(command) is Stop:
            for call_id in command.call_ids:
                self._stop(call_id)

    def _report(self, summary: RoundSummary) -> None:
        self._predictor.observe(summary)
        for name, model in self.view.models.items():
            model.timing = self._predictor.timing(name)
        self.rounds += 1
        self.deadline_risk += summary.at_risk
        for slot in summary.slots:
            for call_id in slot.parked_calls:
                run = self.runs.get(call_id)
                if run is not None:
                    run.parked += 1
        self._host.round_closed(summary)

    # --- a call's way in -------------------------------------------------------------------------------------------

    def post(self, run: AgentCall) -> None:
        run.posted = True
        run.attempts += 1
        run.client.post(run.model)

    def arrive(self, run: AgentCall) -> None:
        run.arrived = True
        self.seen.add(run.seq)
        self.memory.look(run)
        self.view.models[run.model].waiting[run.id] = run.view
        self.happened(Arrived(run.view.call))

    def _held(self, run: AgentCall, message: Held) -> None:
        """Its engine has rendered it: from now on its counts are exact."""
        run.prompt, run.ready = message.prompt, True
        if run.dropped:
            self._engines.send(run.model, Drop(run.engine_id, 504, run.dropped))
            return
        if run.chain is None:
            run.chain = PageChain(self.limits[run.model].page_tokens, run.prompt)
            run.view.call = self.memory.lines.exact(run.view.call, run.prompt, run.chain)
        tokens, most = run.view.call.prompt_tokens, self.memory.most_prompt_tokens(run.model)
        if tokens > most:
            self._refuse(run, f"the prompt has {tokens} tokens: {run.model} takes at most {most} here")
        elif not run.arrived:
            self.arrive(run)
        elif run.grant_steps is not None:
            self._grant(run, run.grant_steps)
        else:
            self.memory.look(run)

    def _refuse(self, run: AgentCall, why: str) -> None:
        """The call can never be served; its client is told so in its own format by the engine that holds it."""
        self._engines.send(run.model, Drop(run.engine_id, 400, why))
        self._give_up(run, why)

    def _give_up(self, run: AgentCall, why: str) -> None:
        """The call fails for good, and its client knows."""
        known = self._take_out(run)
        self.leave(run, "failed", why)
        if known:
            self.happened(Rejected(run.id, why, final=True))

    def _admit(self, run: AgentCall, grant: int, *, by_sp: bool) -> None:
        model = self.view.models[run.model]
        refusal = self._refusal(run, model)
        if refusal:
            self._inbox.append(Rejected(run.id, refusal))
            return
        self.memory.look(run)
        del model.waiting[run.id]
        model.running[run.id] = run.view
        run.by_sp, run.admitted_s = by_sp, self.clock()
        run.rounds_waited = self.rounds - run.arrived_round
        if run.ready:
            self._grant(run, grant)
            return
        run.grant_steps = grant
        if not run.posted:
            self.post(run)

    def _refusal(self, run: AgentCall, model: ModelView) -> str:
        """Why the engine would only queue the call beside what runs, which would stall the batch it is in; empty: it fits."""
        if model.running and run.view.call.prompt_tokens >= self.memory.free_tokens(run.model):
            return "no free KV"
        return ""

    def _resume(self, run: AgentCall, grant: int) -> None:
        model = self.view.models[run.model]
        model.running[run.id] = model.held.pop(run.id)
        self._grant(run, grant)

    def _grant(self, run: AgentCall, steps: int) -> None:
        run.grant_steps, run.granted = None, True
        self.heard_s[run.model] = self.clock()
        self._engines.send(run.model, Grant(run.engine_id, steps))

    def _stop(self, call_id: int) -> None:
        """The segment ends at its next token, or by itself before its engine hears of it; one that has not begun has that token only."""
        run = self.runs.get(call_id)
        if run is None:
            return
        if run.granted:
            self._engines.send(run.model, StopSegment(run.engine_id))
        elif run.grant_steps is not None:
            run.grant_steps = 0

    # --- what engines say ------------------------------------------------------------------------------------------

    def heard(self, model: str, message: FromEngine) -> None:
        """A message about one of its calls; one about a call that is over is of no interest."""
        now_s = self.heard_s[model] = self.clock()
        if isinstance(message, Hello):
            return
        run = self.runs.get(call_number(message.call))
        if run is None or run.model != model or not run.posted:
            return
        if type(message) is Progress:
            self._progressed(run, message.output_tokens, now_s)
        elif type(message) is Ended:
            self._ended(run, message)
        elif type(message) is Held:
            self._held(run, message)

    def _progressed(self, run: AgentCall, output_tokens: int, now_s: float) -> None:
        if not run.granted:
            return
        if self.decode.knows(run.id):
            self.decode.decoded(run.id, output_tokens, now_s)
            return
        self.decode.prefilled(run.id, run.view.call.prompt_tokens, output_tokens, now_s)
        if run.view.generated_tokens == 0:
            run.view.generated_tokens = 1
            run.first_token_s = now_s
            self.happened(FirstToken(run.id))

    def _ended(self, run: AgentCall, message: Ended) -> None:
        if not run.granted:  # it was held: its client went away, or its connection to the engine broke
            self._cancelled(run, run.dropped or message.why or "its client went away")
            return
        if message.output_tokens > 0:
            self._progressed(run, message.output_tokens, self.clock())
        run.granted = False
        model = self.view.models[run.model]
        self.decode.ended(run.id)
        self.decode.show(model)
        run.found(message)
        run.output += message.tokens
        run.view.generated_tokens = message.output_tokens
        if run.dropped or message.reason == "aborted":
            self._cancelled(run, run.dropped or "its client went away")
        elif message.reason == "failed":
            self._give_up(run, message.why)
        elif message.reason == "finished":
            self._finished(run)
        else:
            run.on_device = True
            model.held[run.id] = model.running.pop(run.id)
            self.happened(SegmentEnded(run.id, message.output_tokens, message.reason))

    def _finished(self, run: AgentCall) -> None:
        """The scheduler hears of it when the line's lease is known, or soon after: else its slot would close in a return's face."""
        call, now_s = run.view.call, self.clock()
        assert run.chain is not None
        chain = run.chain.copy()
        chain.extend(bytes(run.output))
        self.memory.lines.used(call, chain, run.prompt + run.output, now_s)
        self.leases.await_word(run)
        self.leave(run, "completed", "")

    def leave(self, run: AgentCall, outcome: str, why: str) -> None:
        """The call's last word."""
        run.over = True
        del self.runs[run.id]
        self.seen.add(run.seq)
        self._host.call_ended(run.books(outcome, why, self.clock()), run.view.call.key)
        run.client.ended()

    # --- ends that are not the engine's doing -----------------------------------------------------------------------

    def end_early(self, run: AgentCall, status: int, why: str) -> None:
        """The client went away, or the call's deadline has come: its client is told ``why``, its engine lets go of it."""
        if run.over or run.dropped:
            return
        run.dropped = why
        if run.ready:
            self._engines.send(run.model, Drop(run.engine_id, status, why))
        else:
            run.client.fail(status, why)
        if not run.granted:
            self._cancelled(run, why)

    def answered(self, run: AgentCall, status: int) -> None:
        """The engine has answered without ever holding the call: it refused it, or the request generates nothing."""
        if not run.over:
            run.ready = False
            if status < 400:
                self._take_out(run)
                self.leave(run, "completed", "")
            else:
                self._give_up(run, f"the engine answered {status}")

    def _cancelled(self, run: AgentCall, why: str) -> None:
        arrived = self._take_out(run)
        self.leave(run, "failed", why)
        if arrived:
            self.happened(Cancelled(run.id))

    def _take_out(self, run: AgentCall) -> bool:
        """Out of the view; whether the scheduler knew the call."""
        model = self.view.models[run.model]
        for calls in (model.waiting, model.running, model.held):
            calls.pop(run.id, None)
        return run.arrived

    # --- calls whose engine comes and goes ---------------------------------------------------------------------------

    def connection_lost(self, run: AgentCall, *, arrived: bool) -> None:
        """The engine broke off its answer, or never began one. If it has died, that will be heard soon; an engine that never had the
        call (not ``arrived``) did not die of it."""
        if not run.over and run.posted:
            if not arrived:
                run.attempts -= 1
            self._loop.call_later(BROKEN_OFF_S if run.ready else STALE_S, self._broken_off, run, run.attempts)

    def _broken_off(self, run: AgentCall, attempts: int) -> None:
        if run.over or not run.posted or run.attempts != attempts:
            return
        if run.ready or attempts >= MOST_ATTEMPTS:
            self.end_early(run, 502, "the engine broke off its answer")
        else:
            self.post(run)

    # --- maintenance -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing under way: no call, no switch, no word awaited, nothing to recover from."""
        return not (self.runs or self.leases.awaited or self.group.busy)

    async def reset(self, knobs: Knobs, *, session_prefill: bool) -> None:
        """Begin anew on an idle instance: the first model active, empty caches, a fresh scheduler. Raises EngineFailed."""
        assert self.idle
        self.alarm.set(None)
        self.view.healthy = False  # nothing is commanded meanwhile
        try:
            first = next(iter(self.view.models))
            if self.view.active == first:
                await self._engines.flush(first)
            else:
                await self._engines.switch(self.view.active, first)
            self._engines.forget_host_kv()
        finally:
            self._begin(knobs, replace(self.capabilities, session_prefill=session_prefill))

    def set_knobs(self, knobs: Knobs) -> None:
        """Tune the scheduler between two of its steps; the next one follows at once, for a slot that lingers by the old ones."""
        self.knobs = knobs
        self._scheduler.set_knobs(knobs)
        self._predictor.alpha = knobs.ewma_alpha
        self._host.tuned(knobs, self.clock())
        self.happened(Tick())

    def renumbered(self) -> None:
        """Another gateway numbers the submissions from here on, from 1."""
        self.seen = SeenSubmissions()
        self.group.forget_wishes()  # it says itself what it wants closed

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("event=bug instance=%s", self.id, exc_info=error)
