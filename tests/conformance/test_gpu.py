"""The instance agent's core under the conformance suite, over engines in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from talaria.gpu.agent.calls import AgentCall
from talaria.gpu.agent.host import Engines, Sizes
from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.protocol.agent import CallEnded, Switched
from talaria.gpu.protocol.engine import call_id
from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC
from talaria.policy.instance import Command, EngineView, Event, ModelView, RoundSummary
from talaria.policy.snapshot import Capabilities
from talaria.policy.timing import Timing
from talaria.profiles import load as load_profile
from tests.conformance.suite import Conformance
from tests.conformance.world import Setup, Step, World
from tests.gpu.fake_engines import FakeEngines
from tests.gpu.virtual_time import VirtualLoop

MODELS = ("Qwen3-235B", "GLM5-nvfp4", "Qwen3.5-122B-A10B")
MOST_STEPS_AT_ONCE = 200


class _Client:
    """A client that waits for its whole answer."""

    def __init__(self, world: AgentWorld, call: Call, prompt: bytes, output_tokens: int) -> None:
        self.began = False
        self.failures: list[tuple[int, str]] = []
        self._world, self._call, self._prompt, self._output_tokens = world, call, prompt, output_tokens

    def post(self, model: str) -> None:
        world = self._world
        world.loop.call_later(world.rendering_s, world.engines.hold, model, call_id(self._call.id), self._prompt, self._output_tokens)

    def fail(self, status: int, why: str) -> None:
        self.failures.append((status, why))

    def ended(self) -> None:
        pass


class AgentWorld:
    """An ``AgentInstance`` and the gateway's part: prompts of calls, leases, and who was told what."""

    names = MODELS
    staging = False

    def __init__(self, setup: Setup) -> None:
        self.models = self.names[: setup.models]
        self.steps: list[Step] = []
        self.endings: list[tuple[int, str]] = []
        self.books: dict[int, CallEnded] = {}
        self.switches: list[Switched] = []
        self.clients: dict[int, _Client] = {}
        self.loop: Any = self._new_loop()
        self.rendering_s = 0.0
        self.answers_s: float | None = 0.0
        """How long after a call's end its gateway says what became of its lease; None: never."""
        self._tau_s = setup.tau_s
        self._tokens: dict[LineKey, bytes] = {}
        self._fresh = 0
        self._submitted = 0
        profile = load_profile("paper-tp8")
        timing = {name: profile.timing(profiled) for name, profiled in zip(self.models, MODELS, strict=False)}
        capabilities = Capabilities(
            hot=setup.hot, session_prefill=setup.session_prefill, hkvr=False, staging=self.staging, inflight_kv="recompute",
            max_resident_models=setup.max_resident_models,
        )  # fmt: skip
        sizes = Sizes(dict.fromkeys(self.models, 10**11), 8 * profile.hardware.hbm_bytes)

        async def build() -> None:
            self.engines: Any = await self._new_engines(timing, self.models[: setup.max_resident_models])
            self.instance = AgentInstance("agent", capabilities, self.engines, dict(timing), sizes, setup.knobs, self, self.now_s)

        self.loop.run_until_complete(build())
        self._hold_down()
        self.engines.say, self.engines.died = self.instance.heard, self.instance.group.died

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()

    async def _new_engines(self, timing: dict[str, Timing], opened: tuple[str, ...]) -> Engines:
        return FakeEngines(timing, opened)

    def _hold_down(self) -> None:
        """What has died stays dead until the suite says otherwise."""
        self._mended = asyncio.Event()
        self._mended.set()
        recover = self.instance.group._recover

        async def mended(model: str) -> None:
            await self._mended.wait()
            await recover(model)

        self.instance.group._recover = mended  # type: ignore[method-assign]

    def __del__(self) -> None:
        self.loop.close()

    def now_s(self) -> float:
        return self.loop.time()

    def submit(self, call: Call, output_tokens: int) -> None:
        prompt = self.tokens_of(call.key)[: 4 * call.reusable_tokens]
        self.submit_prompt(call, prompt + self.new_tokens(call.prompt_tokens - len(prompt) // 4), output_tokens)

    def tokens_of(self, key: LineKey) -> bytes:
        """Prompt and output of the line's last call."""
        return self._tokens.get(key, b"")

    def submit_prompt(self, call: Call, prompt: bytes, output_tokens: int) -> None:
        """``submit`` with this very prompt, whatever the call says of it."""
        self._tokens[call.key] = prompt + b"".join(index.to_bytes(4, "little") for index in range(output_tokens))
        self._submitted += 1
        client = self.clients[call.id] = _Client(self, call, prompt, output_tokens)
        run = self.loop.run_until_complete(self._submit(call, client))
        assert self.loop.advance(lambda: run.arrived or run.over, 10.0)

    async def _submit(self, call: Call, client: _Client) -> AgentCall:
        return self.instance.submit(call, client, self._submitted)

    def new_tokens(self, count: int) -> bytes:
        first, self._fresh = self._fresh + 1_000_000, self._fresh + count
        return b"".join(token.to_bytes(4, "little") for token in range(first, first + count))

    def command(self, command: Command) -> None:
        self.do(lambda: self.instance._execute(command))

    def cancel(self, call_id: int) -> None:
        self.do(lambda: self.instance.end_early(self.instance.runs[call_id], 499, "its client went away"))

    def crash(self, rank: int) -> None:
        if not self.instance.healthy():
            return
        self._mended.clear()
        model = self.instance.group.target or self.engines.active() or self.models[0]
        self.do(lambda: self.engines.crash(model))

    def recover(self) -> None:
        if not self._mended.is_set():
            self.do(self._mended.set)
            assert self.loop.advance(self.instance.healthy, 10.0)

    def fail_switch(self, why: str) -> None:
        assert self.loop.advance(lambda: self.engines.failing is not None, 1.0)
        self.engines.fail_switch(why)
        assert self.loop.advance(lambda: self.instance.group.target is None, 10.0)

    def refuse_next(self, why: str) -> None:
        refusal = self.instance._refusal

        def refuse(run: AgentCall, model: ModelView) -> str:
            self.instance._refusal = refusal  # type: ignore[method-assign]
            return why

        self.instance._refusal = refuse  # type: ignore[method-assign]

    def deliver(self, event: Event) -> None:
        self.do(lambda: self.instance.happened(event))

    def do(self, action: Callable[[], None]) -> None:
        """In the loop, as everything that happens to an agent."""

        async def act() -> None:
            action()

        self.loop.run_until_complete(act())

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        return self.loop.advance(until, limit_s)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, also where nothing else happens."""
        over: list[bool] = []
        self.loop.call_later(seconds, over.append, True)
        assert self.loop.advance(lambda: bool(over), 2.0 * seconds)

    def settle(self) -> None:
        assert not self.loop.advance(lambda: False, 1e5), "unreachable"
        assert self.loop.at_rest, f"no rest in sight: {[(s.now_s, s.event, s.commands) for s in self.steps[-5:]]}"

    def audit(self) -> list[str]:
        wrong = [f"{name} still holds {list(engine.calls)}" for name, engine in self.engines.engines.items() if engine.calls]
        if not self.instance.idle:
            wrong.append("the agent is not idle")
        return wrong

    # --- the host of the instance ----------------------------------------------------------------------------------

    def stepped(self, event: Event, view: EngineView, now_s: float, commands: list[Command]) -> None:
        self.steps.append(Step(event, CODEC.decode(CODEC.encode(view)), now_s, tuple(commands)))
        recent = self.steps[-MOST_STEPS_AT_ONCE:]
        assert len(recent) < MOST_STEPS_AT_ONCE or recent[0].now_s < now_s, f"a livelock: {[(s.event, s.commands) for s in recent[-6:]]}"

    def call_ended(self, ended: CallEnded, key: LineKey) -> None:
        self.endings.append((ended.call, ended.outcome))
        self.books[ended.call] = ended
        if ended.outcome != "completed" or self.answers_s is None:
            return
        lease = (key, self.now_s() + self._tau_s if self._tau_s > 0.0 else None)
        if self.answers_s:
            self.loop.call_later(self.answers_s, self.instance.lease_changed, *lease)
        else:
            self.instance.lease_changed(*lease)

    def round_closed(self, summary: RoundSummary) -> None:
        active_s = sum(slot.closed_s - slot.opened_s for slot in summary.slots)
        assert abs(summary.ended_s - summary.started_s - active_s - summary.switch_s) < 1e-6

    def switched(self, switch: Switched) -> None:
        self.switches.append(switch)

    def phase(self, name: str, model: str, started_s: float, ended_s: float) -> None:
        assert started_s <= ended_s

    def slot_opened(self) -> None:
        self.instance.snapshot()

    def health_changed(self) -> None:
        self.instance.snapshot()


class TestAgent(Conformance):
    def build(self, setup: Setup) -> World:
        return AgentWorld(setup)
