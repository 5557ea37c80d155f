"""Ground truth of one engine: prefill stalls decode, decode runs in macro-steps.

Consecutive decode steps between two boundaries are one kernel event whose duration is the exact sum of the steps; a
batch that arrives in between cuts it at the next step boundary. With ``macro=False`` every step is an event of its own:
the oracle of the tests.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from simpy.events import Event

from talaria.policy.instance import CallView, ModelView
from talaria.policy.timing import Timing
from talaria.sim.kernel import Alarm, Kernel


class Run:
    """One call inside an instance: its view, what the trace says of it, and what happened to it so far."""

    __slots__ = (
        "admitted_s",
        "arrived_round",
        "by_sp",
        "device_tokens",
        "done",
        "end_step",
        "first_token_s",
        "grant",
        "host_tokens",
        "known",
        "lost_tokens",
        "new_tokens",
        "node",
        "output_tokens",
        "parked",
        "placed_s",
        "prompt_tokens",
        "rounds_waited",
        "saved_tokens",
        "spans",
        "start_generated",
        "start_step",
        "swapped",
        "view",
    )  # fmt: skip

    def __init__(self, view: CallView, node: int, output_tokens: int, done: Event) -> None:
        self.view = view
        self.prompt_tokens = view.call.prompt_tokens
        self.node = node
        self.output_tokens = output_tokens
        self.done = done
        self.placed_s = view.arrived_s
        self.admitted_s = self.first_token_s = -1.0
        self.by_sp = self.swapped = False
        self.device_tokens = self.host_tokens = self.lost_tokens = self.new_tokens = 0
        self.spans: tuple[tuple[int, int, int], ...] = ()
        self.saved_tokens = 0
        """Of its context, in a host buffer since the last time it left the device in flight."""
        self.known = (-1, 0, 0)
        """What the memory last found of its prompt, (device, host) tokens, and as of which change."""
        self.parked = self.arrived_round = self.rounds_waited = 0
        self.grant = self.start_step = self.end_step = self.start_generated = 0

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.view.generated_tokens


class _Mode(Enum):
    IDLE = 0
    PREFILL = 1
    DECODE = 2
    BOUNDARY = 3


_IDLE: Final = _Mode.IDLE  # looked up once: see ``policy/snapshot.py``
_PREFILL: Final = _Mode.PREFILL
_DECODE: Final = _Mode.DECODE
_BOUNDARY: Final = _Mode.BOUNDARY


class Engine:
    """Executes forwarded calls of the active model. Reports to its host through two callbacks, at boundaries only.

    The ``decode_*`` counters count over all models that it has served: their host takes differences.
    """

    def __init__(
        self, env: Kernel, first_token: Callable[[Run], None], segment_ended: Callable[[Run, str], None],
        decode_noise: Callable[[], float], *, macro: bool = True,
    ) -> None:  # fmt: skip
        self._env = env
        self._first_token = first_token
        self._segment_ended = segment_ended
        self._noise = decode_noise
        self._macro = macro
        self._timing: Timing | None = None
        self._model = ""
        self._mode = _IDLE
        self._alarm: Alarm | None = None
        self._queue: deque[tuple[list[Run], float, bool]] = deque()
        self._heap: list[tuple[int, int, Run]] = []
        self._pushed = 0
        self._step = 0
        self._batch = 0
        self._context = 0
        self._factor = 1.0
        self._macro_steps = 0
        self._macro_started_s = 0.0
        self._macro_s = 0.0
        self.decode_s = 0.0
        self.decode_steps = 0
        self.decode_sequence_steps = 0
        self.decode_context_steps = 0
        self.largest_batch: dict[str, int] = {}
        """Most sequences in one decode step, by model."""

    @property
    def idle(self) -> bool:
        return not self._heap and not self._queue and self._mode in (_IDLE, _BOUNDARY)

    def load(self, model: str, timing: Timing) -> None:
        """``model`` is served from now on, by the curves ``timing``; only an idle engine changes it."""
        assert self.idle, "a switch met a busy engine"
        self._model, self._timing = model, timing
        self.largest_batch.setdefault(model, 0)

    def show(self, model: ModelView) -> None:
        """The decode counters of ``model``, as they are now: a slot counts by differences, from its opening on."""
        model.decode_s, model.decode_steps = self.decode_s, self.decode_steps
        model.decode_sequence_steps, model.decode_context_steps = self.decode_sequence_steps, self.decode_context_steps

    def prefill(self, run: Run, duration_s: float) -> None:
        """Queue one admitted call; decode of everything else stalls meanwhile."""
        self._enqueue([run], duration_s, fresh=True)

    def resume(self, runs: list[Run], duration_s: float) -> None:
        """Queue the re-entry of calls whose next grant begins."""
        self._enqueue(runs, duration_s, fresh=False)

    def _enqueue(self, runs: list[Run], duration_s: float, *, fresh: bool) -> None:
        self._queue.append((runs, duration_s, fresh))
        if self._mode is _IDLE:
            self._continue()
        elif self._mode is _DECODE and len(self._queue) == 1:
            self._cut_macro_step()

    def stop(self, run: Run) -> None:
        """End the running segment of ``run`` at the next step boundary (SPEC §4.1: no running kernel is preempted)."""
        if self._mode is _DECODE:
            self._cut_macro_step()
        boundary = self._step + (self._macro_steps if self._mode is _DECODE else 0)
        for index, (end_step, order, other) in enumerate(self._heap):
            if other is run and end_step > boundary:
                run.end_step = boundary
                self._heap[index] = (boundary, order, run)
                heapq.heapify(self._heap)
                return
        if any(run in runs for runs, _, _ in self._queue):
            run.grant = 0  # it ends with its prefill

    def abort(self) -> None:
        """The engine is gone, and everything in it; nothing is reported."""
        self._queue.clear()
        self._heap.clear()
        self._alarm = None
        self._mode = _IDLE
        self._batch = self._context = 0

    def _continue(self) -> None:
        """At a boundary: the queue first, then a macro-step up to the next end of a segment."""
        if self._queue:
            self._mode = _PREFILL
            self._alarm = self._env.alarm(self._queue[0][1], self._finish_prefill)
        elif self._heap:
            assert self._timing is not None
            self._mode = _DECODE
            steps = self._heap[0][0] - self._step
            self._macro_steps = steps if self._macro else min(steps, 1)
            self._macro_started_s = self._env.now
            self._macro_s = self._factor * self._timing.steps_s(self._macro_steps, self._batch, self._context)
            self._alarm = self._env.alarm(self._macro_s, self._finish_macro_step)
        else:
            self._mode = _IDLE
            self._alarm = None

    def _cut_macro_step(self) -> None:
        """Shorten the macro-step under way to the first step boundary that is not in the past."""
        elapsed_s = self._env.now - self._macro_started_s
        steps = self._steps_within(elapsed_s)
        if steps < self._macro_steps:
            assert self._timing is not None
            self._macro_steps = steps
            self._macro_s = self._factor * self._timing.steps_s(steps, self._batch, self._context)
            self._alarm = self._env.alarm(max(0.0, self._macro_s - elapsed_s), self._finish_macro_step)

    def _steps_within(self, elapsed_s: float) -> int:
        """The fewest whole steps that last at least ``elapsed_s``: the root of a·k² + b·k = elapsed, rounded up."""
        assert self._timing is not None
        timing, factor, batch, context = self._timing, self._factor, self._batch, self._context
        a = 0.5 * timing.decode_s_per_context_token * batch
        b = timing.step_s(batch, context) - a
        wanted_s = elapsed_s / factor
        root = wanted_s / b if a <= 0.0 else (math.sqrt(b * b + 4.0 * a * wanted_s) - b) / (2.0 * a)
        steps = max(1, int(root))
        tolerance_s = 1e-9 * (1.0 + elapsed_s)
        while factor * timing.steps_s(steps, batch, context) < elapsed_s - tolerance_s:
            steps += 1
        return steps

    def _finish_prefill(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        runs, _, fresh = self._queue.popleft()
        self._mode = _BOUNDARY
        self._factor = self._noise()
        ended = []
        for run in runs:
            if fresh:
                run.view.generated_tokens = 1
            run.start_step = self._step
            run.start_generated = run.view.generated_tokens
            steps = min(run.grant, run.output_tokens - run.start_generated)
            if steps <= 0:
                ended.append(run)
                continue
            run.end_step = self._step + steps
            self._pushed += 1
            heapq.heappush(self._heap, (run.end_step, self._pushed, run))
            self._batch += 1
            self._context += run.prompt_tokens + run.start_generated
        if self._batch > self.largest_batch[self._model]:
            self.largest_batch[self._model] = self._batch
        if fresh:
            for run in runs:
                self._first_token(run)
        for run in ended:
            self._segment_ended(run, _reason(run))
        if self._mode is _BOUNDARY:
            self._continue()

    def _finish_macro_step(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        steps, batch = self._macro_steps, self._batch
        self.decode_s += self._macro_s
        self.decode_steps += steps
        self.decode_sequence_steps += steps * batch
        self.decode_context_steps += steps * self._context + batch * (steps * (steps - 1) // 2)
        self._step += steps
        self._context += steps * batch
        self._mode = _BOUNDARY
        ended = []
        while self._heap and self._heap[0][0] <= self._step:
            run = heapq.heappop(self._heap)[2]
            run.view.generated_tokens = generated = run.start_generated + self._step - run.start_step
            self._batch -= 1
            self._context -= run.prompt_tokens + generated
            ended.append(run)
        if ended:
            self._factor = self._noise()
        for run in ended:
            self._segment_ended(run, _reason(run))
        if self._mode is _BOUNDARY:
            self._continue()


def _reason(run: Run) -> str:
    if run.view.generated_tokens >= run.output_tokens:
        return "finished"
    return "grant" if 0 < run.grant <= run.end_step - run.start_step else "stopped"
