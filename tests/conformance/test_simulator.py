"""The simulator's instance under the conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC
from talaria.policy.instance import Command, EngineView, Event, RoundSummary
from talaria.policy.snapshot import Capabilities
from talaria.profiles import load as load_profile
from talaria.sim.engine import Run
from talaria.sim.host import CallTruth, Ground, LogicalSwitch
from talaria.sim.instance import SimInstance
from talaria.sim.kernel import Kernel
from talaria.sim.memory import InstanceMemory
from talaria.sim.noise import factors
from talaria.sim.variation import SwitchVariation
from talaria.substrate.prefix import PrefixForest
from tests.conformance.suite import Conformance
from tests.conformance.world import Setup, Step, World

MODELS = ("Qwen3-235B", "GLM5-nvfp4", "Qwen3.5-122B-A10B")
MOST_STEPS_AT_ONCE = 200


class SimulatedWorld:
    """A ``SimInstance`` and the gateway's part: truth of calls, leases, and who was told what."""

    def __init__(self, setup: Setup) -> None:
        self.models = MODELS[: setup.models]
        self.steps: list[Step] = []
        self.endings: list[tuple[int, str]] = []
        self.rounds: list[RoundSummary] = []
        self._tau_s = setup.tau_s
        self._env = Kernel()
        self._forest = PrefixForest()
        self._truth: dict[int, CallTruth] = {}
        self._nodes: dict[LineKey, int] = {}
        profile = load_profile("paper-tp8")
        timing = {name: profile.timing(name) for name in self.models}
        exact = factors(np.random.default_rng(0), 0.0)
        capabilities = Capabilities(
            hot=setup.hot, session_prefill=setup.session_prefill, hkvr=setup.hkvr, staging=setup.staging and not setup.hot,
            inflight_kv=setup.inflight_kv, max_resident_models=setup.max_resident_models,
        )  # fmt: skip
        self.memory = InstanceMemory(profile, self.models, self._forest, hkvr=setup.hkvr, swap=setup.inflight_kv == "swap")
        ground = Ground(timing, exact, exact, SwitchVariation(profile.hardware, lambda _: np.random.default_rng(0), vary=False))
        self.instance = SimInstance(
            self._env, 0, "simulated", capabilities, self.models, ground, self.memory, dict(timing),
            setup.knobs, self._truth, self, self._stepped,
        )  # fmt: skip
        self.instance.open_at_start(self.models[: setup.max_resident_models])

    def now_s(self) -> float:
        return self._env.now

    def submit(self, call: Call, output_tokens: int) -> None:
        end = call.prompt_tokens + output_tokens
        if call.reusable_tokens:
            node = self._forest.extend(self._nodes[call.key], call.reusable_tokens, end)
        else:
            node = self._forest.extend(self._forest.new_root(), 0, end)
        self._forest.retain(node)
        self._nodes[call.key] = node
        self._truth[call.id] = CallTruth(node, output_tokens)
        self.instance.submit(call)

    def command(self, command: Command) -> None:
        self.instance._execute(command)

    def cancel(self, call_id: int) -> None:
        self.instance.cancel(call_id)

    def crash(self, rank: int) -> None:
        if self.instance.healthy():
            self.instance.engine_down(rank)

    def recover(self) -> None:
        if not self.instance.healthy():
            self.instance.engine_up()

    def fail_switch(self, why: str) -> None:
        self.instance.switch_failed(why)

    def refuse_next(self, why: str) -> None:
        admit = self.memory.admit

        def refuse(run: Run, grant: int, now_s: float) -> str | None:
            self.memory.admit = admit  # type: ignore[method-assign]
            return why

        self.memory.admit = refuse  # type: ignore[method-assign]

    def deliver(self, event: Event) -> None:
        self.instance._happened(event)

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        deadline_s = self._env.now + limit_s
        while not until():
            if self._env.peek() > deadline_s or self._env.peek() == float("inf"):
                return False
            self._env.step()
        return True

    def settle(self) -> None:
        assert not self.advance(lambda: self._env.now > 1e5, 1e6), f"no rest in sight: {_brief(self.steps[-5:])}"

    def audit(self) -> list[str]:
        return self.memory.audit()

    def _stepped(self, name: str, event: Event, view: EngineView, now_s: float, commands: list[Command]) -> None:
        self.steps.append(Step(event, CODEC.decode(CODEC.encode(view)), now_s, tuple(commands)))
        recent = self.steps[-MOST_STEPS_AT_ONCE:]
        assert len(recent) < MOST_STEPS_AT_ONCE or recent[0].now_s < now_s, f"a livelock: {_brief(recent[-6:])}"

    # --- the host of the instance ----------------------------------------------------------------------------------

    def finished(self, run: Run, instance: SimInstance) -> None:
        call = run.view.call
        self.endings.append((call.id, "completed"))
        if self._tau_s > 0.0:
            instance.lease_changed(call.key, self._env.now + self._tau_s)

    def failed(self, run: Run, instance: SimInstance) -> None:
        self.endings.append((run.view.call.id, "failed"))

    def slot_opened(self, instance: SimInstance) -> None:
        instance.snapshot()

    def footprint_peaks(self, instance: SimInstance) -> None:
        pass

    def health_changed(self, instance: SimInstance) -> None:
        instance.snapshot()

    def round_closed(self, instance: SimInstance, summary: RoundSummary) -> None:
        active_s = sum(slot.closed_s - slot.opened_s for slot in summary.slots)
        assert abs(summary.ended_s - summary.started_s - active_s - summary.switch_s) < 1e-6
        self.rounds.append(summary)

    def switched(self, instance: SimInstance, switch: LogicalSwitch) -> None:
        pass

    def phase(self, instance: SimInstance, name: str, model: str, started_s: float, ended_s: float) -> None:
        pass


def _brief(steps: list[Step]) -> list[tuple[float, Event, tuple[Command, ...]]]:
    return [(step.now_s, step.event, step.commands) for step in steps]


class TestSimulator(Conformance):
    def build(self, setup: Setup) -> World:
        return SimulatedWorld(setup)
