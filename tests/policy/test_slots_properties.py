"""Whatever happens in whatever order: commands are legal, SP keeps to its budget, every call ends, and time moves on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.policy.instance import Admit, CallView, RestoredShort, StageProgress
from talaria.policy.predict import admission_s
from talaria.policy.rounds import step_s
from talaria.policy.snapshot import Residency
from tests.conformance.legality import Referee
from tests.conformance.world import Step
from tests.policy.builders import TIMING, Done, ModelHost, call, host

MODELS = "abc"
VARYING = replace(TIMING, decode_s_per_sequence=1e-3, decode_s_per_context_token=1e-7)

numbers = st.integers(0, 7)
happenings = st.one_of(
    st.tuples(st.just("first"), numbers, st.sampled_from(MODELS), st.sampled_from([500, 5000, 40_000]), st.sampled_from([1, 60, 900])),
    st.tuples(st.just("again"), numbers, st.just(""), st.sampled_from([50, 2000]), st.sampled_from([1, 60, 900])),
    st.tuples(
        st.sampled_from(["cancel", "lease", "unlease", "refuse", "crash", "recover", "fail switch", "restored short", "staged"]), numbers
    ),
)
streams = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.05, 0.3, 2.0, 9.0]), happenings), min_size=1, max_size=25)
returns = st.lists(
    st.tuples(st.floats(0.0, 0.8), st.integers(300, 40_000), st.integers(50, 9000), st.sampled_from([1, 60, 900])), min_size=3, max_size=25
)
settings_of_instance = st.fixed_dictionaries(
    {
        "session_prefill": st.booleans(),
        "max_resident_models": st.sampled_from([1, 2, 3]),
        "max_running": st.sampled_from([2, 256]),
        "max_wait_rounds": st.sampled_from([1, 3]),
        "round_order": st.sampled_from(["stable", "oldest"]),
        "round_share": st.sampled_from(["equal", "demand"]),
        "sp_order": st.sampled_from(["fifo", "cheapest"]),
        "visit_idle": st.booleans(),
        "lease_s": st.sampled_from([0.0, 1.0]),
        "kv_tokens": st.sampled_from([60_000, 1_000_000]),
    }
)


@dataclass
class Story:
    """Applies a stream of happenings to a host."""

    made: ModelHost

    def __post_init__(self) -> None:
        self.referee = Referee()
        self.submitted = 0
        self.last: dict[int, Any] = {}
        self.sp_batches = 0
        self.made.watch = self.watch

    def run(self, stream: list[tuple[float, tuple[Any, ...]]]) -> None:
        time_s = 0.0
        for pause_s, happening in stream:
            time_s += pause_s
            self.made.at(time_s, self.happen, *happening)
        self.made.at(time_s + 50.0, self.made.recover)
        self.made.run(time_s + 5000.0)

    def happen(self, kind: str, number: int, model: str = "", tokens: int = 0, output: int = 0) -> None:
        made = self.made
        if kind == "first" or (kind == "again" and number not in self.last):
            self.submitted += 1
            self._submit(number, call(self.submitted, model or "a", session=f"s{number}", prompt=tokens, output=output))
        elif kind == "again":
            before = self.last[number]
            self.submitted += 1
            reusable = before.prompt_tokens + (before.expected_output_tokens or 0)
            self._submit(
                number,
                replace(
                    before, id=self.submitted, turn=before.turn + 1, prompt_tokens=min(reusable + tokens, 58_000),
                    reusable_tokens=min(reusable, 57_000), expected_output_tokens=output,
                ),
            )  # fmt: skip
        elif kind == "cancel":
            made.cancel(number + 1)
        elif kind in ("lease", "unlease"):
            made.lease(call(1, MODELS[number % 3], session=f"s{number}").key, 3.0 if kind == "lease" else None)
        elif kind == "refuse":
            made.refusals += 1
        elif kind == "crash":
            if made.view.healthy:
                made.crash()
        elif kind == "recover":
            made.recover()
        elif kind == "fail switch":
            made.fail_switch()
        elif kind == "restored short":
            made.happened(RestoredShort(number + 1, 64))
        elif kind == "staged":
            made.happened(StageProgress(MODELS[number % 3], 0.5, 0.0))

    def _submit(self, number: int, item: Any) -> None:
        self.last[number] = item
        self.made.submit(item)

    def watch(self, made: ModelHost, step: Done) -> None:
        self.referee.follow([Step(step.event, made.view, step.now_s, tuple(step.commands))])
        for command in step.commands:
            if isinstance(command, Admit) and command.phase == "SP":
                self.check_budget(made, command, step.now_s)

    def check_budget(self, made: ModelHost, command: Admit, now_s: float) -> None:
        """Restore, prefill, and all decode promised before run within the slot, at the pace of the larger batch."""
        self.sp_batches += 1
        slot = made.scheduler._slot
        assert slot is not None and slot.promised_until_s <= slot.ends_s + 1e-9
        model = made.view.models[slot.model]
        batch = [model.waiting[call_id] for call_id, _ in command.batch]
        cost_s = sum(admission_s(model.timing, item) for item in batch)
        pace_s = step_s(model, len(batch), sum(item.call.prompt_tokens for item in batch))
        steps = max(
            made.promised_steps,
            *(min(grant, item.call.expected_output_tokens or 0) for item, (_, grant) in zip(batch, command.batch, strict=True)),
        )
        assert cost_s + steps * pace_s <= slot.ends_s - now_s + pace_s, f"SP of {cost_s} s and {steps} steps passes the slot's end"


def story(**options: Any) -> Story:
    made = host(*MODELS, timing=VARYING, **options)
    for name in MODELS[options.get("max_resident_models", 8) :]:
        made.view.models[name].residency = Residency.ABSENT
    return Story(made)


@settings(max_examples=120)
@given(streams, settings_of_instance)
def test_any_stream_of_events_gives_legal_commands_and_ends_every_call(stream: Any, options: dict[str, Any]) -> None:
    told = story(**options)
    told.run(stream)
    assert set(told.made.ended) == set(range(1, told.submitted + 1))


@settings(max_examples=100)
@given(returns, st.integers(1, 6), st.sampled_from(["fifo", "cheapest"]))
def test_sp_never_exceeds_what_is_left_after_protected_decode(arrivals: Any, ordinary: int, sp_order: str) -> None:
    """Returns come while calls of their model decode and another model waits."""
    told = story(lease_s=1.0, sp_order=sp_order)
    made, time_s = told.made, 0.2
    for number in range(2, ordinary + 1):
        made.view.models["a"].waiting[number] = CallView(call(number, prompt=4000, output=900), 0.0)
    made.submit(call(1, prompt=4000, output=900), call(9, "b"))
    for number, (pause_s, prefix, suffix, output) in enumerate(arrivals, 10):
        item = call(number, session=f"r{number}", turn=1, prompt=prefix + suffix, reusable=prefix, output=output)
        made.cache(item.key, prefix)
        time_s += pause_s
        made.at(time_s, made.submit, item)
    made.run()
    assert len(made.ended) == ordinary + 1 + len(arrivals) and told.sp_batches > 0


@settings(max_examples=30)
@given(streams, settings_of_instance)
def test_the_same_events_give_the_same_commands(stream: Any, options: dict[str, Any]) -> None:
    first, second = story(**options), story(**options)
    first.run(stream)
    second.run(stream)
    assert [(step.now_s, step.event, step.commands) for step in first.made.done] == [
        (step.now_s, step.event, step.commands) for step in second.made.done
    ]


@settings(max_examples=60)
@given(streams, settings_of_instance)
def test_round_reports_add_up_under_any_stream(stream: Any, options: dict[str, Any]) -> None:
    told = story(**options)
    told.run(stream)
    for summary in told.made.rounds:
        active_s = sum(slot.closed_s - slot.opened_s for slot in summary.slots)
        assert abs(summary.ended_s - summary.started_s - active_s - summary.switch_s) < 1e-6
        assert all(
            min(slot.prefill_s, slot.sp_s, slot.linger_s, slot.sp_admitted, slot.p_admitted, slot.parked) >= 0 for slot in summary.slots
        )
        assert all(slot.prefill_s + slot.decode_s + slot.linger_s <= slot.closed_s - slot.opened_s + 0.1 for slot in summary.slots)
