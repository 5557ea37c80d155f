"""What decode has cost, measured from what the engines report: ``ModelView``'s counters of one active model after another."""

from __future__ import annotations

from dataclasses import dataclass

from talaria.policy.instance import ModelView


@dataclass(slots=True)
class _Sequence:
    tokens: int
    """Prompt and output."""
    output_tokens: int
    step: int
    """The decode step that gave its newest token."""


class DecodeClock:
    """Counts steps by output tokens, never by messages; counters only grow, over all models (a slot takes differences).

    Every running sequence takes part in every decode step, so the sequence that is furthest says how many there were. The
    seconds of a step are those since the step before, or since a prefill ended in between: stalls for prefill are not decode.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.sequence_steps = 0
        self.context_steps = 0
        self._sequences: dict[int, _Sequence] = {}
        self._marked_s = 0.0

    def prefilled(self, call: int, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """The first output of a segment: it comes from the prefill, decode begins after it."""
        self._sequences[call] = _Sequence(prompt_tokens + output_tokens, output_tokens, self.steps)
        self._marked_s = now_s

    def decoded(self, call: int, output_tokens: int, now_s: float) -> None:
        """The sequence has ``output_tokens`` by now, all segments together."""
        sequence = self._sequences[call]
        steps = output_tokens - sequence.output_tokens
        if steps <= 0:
            return
        self.sequence_steps += steps
        self.context_steps += steps * sequence.tokens + steps * (steps - 1) // 2
        sequence.output_tokens = output_tokens
        sequence.tokens += steps
        sequence.step += steps
        if sequence.step > self.steps:
            self.steps = sequence.step
            self.seconds += now_s - self._marked_s
            self._marked_s = now_s

    def knows(self, call: int) -> bool:
        """Whether the call's segment is out of its prefill."""
        return call in self._sequences

    def ended(self, call: int) -> None:
        self._sequences.pop(call, None)

    def show(self, model: ModelView) -> None:
        """Copy the counters to where the slot scheduler reads them."""
        model.decode_s, model.decode_steps = self.seconds, self.steps
        model.decode_sequence_steps, model.decode_context_steps = self.sequence_steps, self.context_steps
