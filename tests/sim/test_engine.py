"""Ground truth of one engine: prefill stalls decode, batches come in at step boundaries, and nothing is lost (DESIGN, "Simulator")."""

from __future__ import annotations

from dataclasses import replace

import pytest

from talaria.policy.instance import CallView
from talaria.sim.engine import Engine, Run
from talaria.sim.kernel import Kernel
from tests.policy.builders import TIMING, call

STEP_S = 0.02


class Bench:
    """An engine with a step of 20 ms whatever the batch, and what it reported: (time, call, what)."""

    def __init__(self, *, macro: bool = True) -> None:
        self.env = Kernel()
        self.told: list[tuple[float, int, str]] = []
        self.engine = Engine(self.env, self._first, self._ended, lambda: 1.0, macro=macro)
        self.engine.load("m", replace(TIMING, decode_base_s=STEP_S))

    def run_of(self, number: int, *, output: int = 100, grant: int = 1000) -> Run:
        made = Run(CallView(call(number), 0.0), 0, output, self.env.event())
        made.grant = grant
        return made

    def _first(self, run: Run) -> None:
        self.told.append((round(self.env.now, 6), run.view.call.id, "first"))

    def _ended(self, run: Run, reason: str) -> None:
        self.told.append((round(self.env.now, 6), run.view.call.id, reason))


@pytest.fixture(params=[True, False], ids=["macro", "single steps"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(macro=request.param)


def test_the_first_token_comes_with_prefill_and_the_rest_with_one_step_each(bench: Bench) -> None:
    bench.engine.prefill(bench.run_of(1, output=11), 0.5)
    bench.env.run()
    assert bench.told == [(0.5, 1, "first"), (0.7, 1, "finished")]


def test_a_grant_ends_a_segment_and_a_resumed_call_goes_on_where_it_was(bench: Bench) -> None:
    run = bench.run_of(1, output=31, grant=20)
    bench.engine.prefill(run, 0.5)
    bench.env.run()
    assert bench.told[-1] == (0.9, 1, "grant") and run.view.generated_tokens == 21
    bench.engine.resume([run], 0.1)
    bench.env.run()
    assert bench.told[-1] == (1.2, 1, "finished") and run.view.generated_tokens == 31


def test_a_batch_comes_in_at_the_next_step_boundary_and_stalls_decode(bench: Bench) -> None:
    bench.engine.prefill(bench.run_of(1, output=101), 0.5)
    bench.env.run(until=0.51)
    bench.engine.prefill(bench.run_of(2, output=1), 0.3)
    bench.env.run()
    assert bench.told == [(0.5, 1, "first"), (0.82, 2, "first"), (0.82, 2, "finished"), (2.8, 1, "finished")]


def test_a_stopped_segment_ends_at_the_next_step_boundary(bench: Bench) -> None:
    run = bench.run_of(1, output=101)
    bench.engine.prefill(run, 0.5)
    bench.env.run(until=0.61)
    bench.engine.stop(run)
    bench.env.run()
    assert bench.told[-1] == (0.62, 1, "stopped") and run.view.generated_tokens == 7


def test_counters_add_up_to_what_ran(bench: Bench) -> None:
    bench.engine.prefill(bench.run_of(1, output=11), 0.5)
    bench.engine.prefill(bench.run_of(2, output=6), 0.5)
    bench.env.run()
    engine = bench.engine
    assert engine.decode_s == pytest.approx(10 * STEP_S)
    assert (engine.decode_steps, engine.decode_sequence_steps) == (10, 15)


def test_a_dead_engine_is_empty_and_reports_nothing_more(bench: Bench) -> None:
    decoding, waiting = bench.run_of(1), bench.run_of(2)
    bench.engine.prefill(decoding, 0.5)
    bench.env.run(until=0.6)
    bench.engine.prefill(waiting, 9.0)
    bench.engine.abort()
    bench.env.run()
    assert bench.told == [(0.5, 1, "first")] and bench.engine.idle


def test_only_an_idle_engine_changes_its_model(bench: Bench) -> None:
    bench.engine.prefill(bench.run_of(1), 0.5)
    with pytest.raises(AssertionError, match="busy engine"):
        bench.engine.load("m", TIMING)


def test_the_largest_batch_is_counted_for_each_model_apart(bench: Bench) -> None:
    for number in (1, 2, 3):
        bench.engine.prefill(bench.run_of(number, output=5), 0.1)
    bench.env.run()
    bench.engine.load("n", TIMING)
    bench.engine.prefill(bench.run_of(4), 0.1)
    bench.env.run()
    assert bench.engine.largest_batch["n"] == 1 and bench.engine.largest_batch["m"] > 1
