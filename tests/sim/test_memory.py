"""The memory of a simulated instance: what happens does not depend on who looks, or when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy.core import Environment

from talaria.policy.calls import Call, LineKey
from talaria.policy.instance import CallView
from talaria.profiles import Profile, load
from talaria.profiles.profile import resolve
from talaria.profiles.schema import ProfileFile
from talaria.sim.engine import Run
from talaria.sim.memory import InstanceMemory
from talaria.substrate.prefix import PrefixForest

PROFILE = load("paper-tp8")
MODELS = tuple(PROFILE.models)


def staging_memory(profile: Profile = PROFILE) -> InstanceMemory:
    """The first model is active, the second is being staged since time 0."""
    memory = InstanceMemory(profile, MODELS, PrefixForest(), hkvr=True, swap=True)
    for name in MODELS:
        memory.open(name)
    memory.activate(MODELS[0])
    memory.stage(MODELS[1], 1.0, 0.0)
    return memory


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 3.0), max_size=20), st.floats(3.0, 4.0))
def test_staging_comes_as_far_however_often_somebody_looks(looks: list[float], end_s: float) -> None:
    watched, unwatched = staging_memory(), staging_memory()
    for look_s in sorted(looks):
        watched.staged(look_s)
    assert watched.staged(end_s) == unwatched.staged(end_s)


def test_staging_advances_with_the_clock_up_to_the_whole_model() -> None:
    memory = staging_memory()
    shares = [memory.staged(time_s)[1] for time_s in (0.0, 0.5, 1.0, 1000.0)]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[2] > 0.0 and shares[-1] == 1.0


HYBRID = "Qwen3.5-122B-A10B"
SPACING = PROFILE.models[HYBRID].checkpoint_tokens
PAGE = PROFILE.hardware.page_tokens


class Serving:
    """A memory that serves one model, and the prompts it was given."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.forest = PrefixForest()
        self.memory = InstanceMemory(PROFILE, MODELS, self.forest, hkvr=False, swap=True)
        self.memory.activate(model)

    def asked(self, node: int, prompt: int, *, line: str = "main", continues: str | None = None) -> Run:
        call = Call(
            1, LineKey("t", "s", self.model, line), 1, 0.0, prompt, continues=() if continues is None else ((continues, prompt),)
        )
        return Run(CallView(call, 0.0), node, 100, Environment().event())

    def device_tokens(self, run: Run) -> int:
        return self.memory.prefix(run, self.model, 1.0)[0]

    def serve(self, prompt: int) -> int:
        """A call on the main line, from the start to its end; returns its node, which holds prompt and response."""
        node = self.forest.extend(self.forest.new_root(), 0, prompt + 100)
        run = self.asked(node, prompt)
        assert self.memory.admit(run, 100, 0.0) is None
        self.memory.finish(run, 0.0)
        return node


def test_a_recurrent_model_goes_on_on_the_device_where_the_line_s_last_call_ended() -> None:
    serving = Serving(HYBRID)
    node = serving.forest.extend(serving.serve(10_000), 10_100, 12_000)
    end = (10_000 + 99) // PAGE * PAGE
    assert end % SPACING and serving.device_tokens(serving.asked(node, 12_000, continues="main")) == end
    assert serving.memory.line_state(LineKey("t", "s", HYBRID, "main"), 0.0, 1.0).tokens == end


def test_a_recurrent_model_goes_on_after_a_rewrite_at_the_last_checkpointed_position_before_it() -> None:
    serving = Serving(HYBRID)
    rewritten = serving.forest.extend(serving.serve(10_000), 9_000, 12_000)
    run = serving.asked(rewritten, 12_000, continues="main")
    assert serving.device_tokens(run) == 9_000 // SPACING * SPACING
    short = serving.forest.extend(serving.serve(10_000), SPACING - 1, 12_000)
    assert serving.device_tokens(serving.asked(short, 12_000, continues="main")) == 0


def test_another_line_cannot_use_a_recurrent_state_that_its_owner_has_left_behind() -> None:
    serving = Serving(HYBRID)
    node = serving.serve(10_000)
    longer = serving.forest.extend(node, 10_100, 12_100)
    run = serving.asked(longer, 12_000, continues="main")
    assert serving.memory.admit(run, 100, 1.0) is None
    serving.memory.finish(run, 1.0)
    fork = serving.forest.extend(node, 10_099, 11_000)
    assert serving.device_tokens(serving.asked(fork, 11_000, line="sub", continues="main")) == 10_099 // SPACING * SPACING


def test_attention_goes_on_on_the_device_on_any_page() -> None:
    serving = Serving(MODELS[0])
    rewritten = serving.forest.extend(serving.serve(10_000), 9_000, 12_000)
    assert serving.device_tokens(serving.asked(rewritten, 12_000)) == 9_000 // PAGE * PAGE


def in_flight(hkvr: bool, *, prompt: int = 10_000) -> tuple[InstanceMemory, Run]:
    """A call of an attention model that has generated ten tokens."""
    forest = PrefixForest()
    memory = InstanceMemory(PROFILE, MODELS, forest, hkvr=hkvr, swap=True)
    memory.activate(MODELS[0])
    node = forest.extend(forest.new_root(), 0, prompt + 100)
    forest.retain(node)
    call = Call(1, LineKey("t", "s", MODELS[0], "main"), 0, 0.0, prompt)
    run = Run(CallView(call, 0.0), node, 100, Environment().event())
    assert memory.admit(run, 20, 0.0) is None
    run.view.generated_tokens = 10
    return memory, run


def kv_s(tokens: int) -> float:
    """Seconds of one rank's link for the KV of ``tokens``."""
    return tokens * PROFILE.models[MODELS[0]].kv_bytes_per_token / PROFILE.hardware.d2h_bytes_per_s


def test_what_left_the_device_once_is_not_copied_to_the_host_again() -> None:
    memory, run = in_flight(hkvr=False)
    assert memory.swap_out(run, 0.0) == pytest.approx(kv_s(10_010))
    assert memory.resume(run, 20, 1.0) is None
    run.view.generated_tokens = 30
    assert memory.swap_out(run, 2.0) == pytest.approx(kv_s(20))


def test_a_call_that_begins_anew_has_nothing_left_in_its_host_buffer() -> None:
    memory, run = in_flight(hkvr=False)
    memory.swap_out(run, 0.0)
    memory.drop(run, 1.0)
    memory.crash()
    memory.activate(MODELS[0])
    run.swapped, run.view.generated_tokens = False, 0
    assert memory.admit(run, 20, 2.0) is None
    run.view.generated_tokens = 2
    assert memory.swap_out(run, 3.0) == pytest.approx(kv_s(10_002))


def test_in_flight_kv_that_the_registry_holds_stays_pinned_there_instead_of_being_copied() -> None:
    memory, run = in_flight(hkvr=True)
    served = Run(run.view, run.node, 100, Environment().event())
    assert memory.admit(served, 20, 0.0) is None
    memory.finish(served, 0.0)  # the same prompt: its pages are on the host once the copy is over
    memory.line_state(run.view.call.key, 0.0, 10.0)
    assert memory.swap_out(run, 10.0) == pytest.approx(kv_s(10_010 - (10_010 // PAGE) * PAGE))
    assert any("pins" in line for line in memory.audit())
    assert memory.resume(run, 20, 11.0) is None
    memory.drop(run, 11.0)
    assert memory.audit() == []


def test_staging_slows_what_serves_beside_it_until_it_is_done() -> None:
    document = PROFILE.file.document()
    document["hardware"]["staging_interference"] = {"value": 1.2, "provenance": "assumed", "source": "a test"}
    memory = staging_memory(resolve(ProfileFile.model_validate(document)))
    assert [memory.serving_slowdown(now_s) for now_s in (0.1, 1000.0)] == [1.2, 1.0]
    memory.unstage()
    assert memory.serving_slowdown(1001.0) == 1.0
