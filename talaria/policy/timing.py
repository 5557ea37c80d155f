"""The shape of a model's latency on one instance: few coefficients, closed forms, no state.

The same class carries two different objects: a simulator's ground truth and a policy's own belief
(``policy/predict.py``). They are never the same instance (DESIGN, "Prediction and truth").
"""

from __future__ import annotations

from talaria.policy.values import value


@value(frozen=True, slots=True)
class Timing:
    """Seconds for the work of one model on one TP group. Tokens are per call, bandwidths are folded into slopes.

    prefill = base + per_token·new + per_token2·new·(cached + new/2): the last term is attention.
    decode step = base + per_sequence·batch + per_context_token·Σ context.
    A lost prefix is recomputed by ``recompute`` where the profile has that curve, by ``prefill`` otherwise.
    """

    prefill_base_s: float
    prefill_s_per_token: float
    prefill_s_per_token2: float
    decode_base_s: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float
    restore_base_s: float
    restore_s_per_token: float
    """H2D of a host-resident prefix."""
    swap_s_per_token: float
    """One way, for the KV of an in-flight sequence that outlives a slot."""
    d2d_switch_s: float
    """Weights fully staged: device copy and the fixed phases."""
    h2d_switch_s: float
    """Nothing staged. Partial coverage interpolates between the two."""
    open_s: float
    """absent → active: load, post-process, capture."""
    recompute_base_s: float = 0.0
    recompute_s_per_token: float = 0.0
    page_tokens: int = 64
    """The unit of prefix reuse: up to a page is never a lost prefix, only suffix, since the last page is not kept whole."""

    def prefill_s(self, new_tokens: int, cached_tokens: int, lost_tokens: int = 0) -> float:
        """Prefill of ``new_tokens`` after ``cached_tokens`` on the device, ``lost_tokens`` of the prefix recomputed."""
        if lost_tokens > 0:
            if self.recompute_s_per_token > 0.0 and lost_tokens > self.page_tokens:
                lost_s = self.recompute_base_s + self.recompute_s_per_token * lost_tokens
                if new_tokens <= 0:
                    return lost_s
                context = cached_tokens + lost_tokens + 0.5 * new_tokens
                return lost_s + new_tokens * (self.prefill_s_per_token + self.prefill_s_per_token2 * context)
            new_tokens += lost_tokens
        if new_tokens <= 0:
            return 0.0
        context = cached_tokens + 0.5 * new_tokens
        return self.prefill_base_s + new_tokens * (self.prefill_s_per_token + self.prefill_s_per_token2 * context)

    def step_s(self, batch: int, context_tokens: int) -> float:
        """One decode step of ``batch`` sequences that hold ``context_tokens`` in total."""
        return self.decode_base_s + self.decode_s_per_sequence * batch + self.decode_s_per_context_token * context_tokens

    def steps_s(self, steps: int, batch: int, context_tokens: int) -> float:
        """The exact sum of ``steps`` consecutive decode steps, during which every context grows by one per step."""
        step_s = self.decode_base_s + self.decode_s_per_sequence * batch + self.decode_s_per_context_token * context_tokens
        return steps * step_s + self.decode_s_per_context_token * batch * (steps * (steps - 1) // 2)

    def restore_s(self, tokens: int) -> float:
        return self.restore_base_s + self.restore_s_per_token * tokens if tokens > 0 else 0.0

    def switch_s(self, coverage: float) -> float:
        """A switch with the share ``coverage`` of the weights staged clean on the device (SPEC §5.3)."""
        return self.h2d_switch_s + (self.d2d_switch_s - self.h2d_switch_s) * coverage

    def scaled(self, *, prefill: float = 1.0, decode: float = 1.0, restore: float = 1.0, switch: float = 1.0) -> Timing:
        """The same shape with each kind of work slower (>1) or faster (<1): EWMA corrections, deliberate errors."""
        return Timing(
            prefill_base_s=self.prefill_base_s * prefill,
            prefill_s_per_token=self.prefill_s_per_token * prefill,
            prefill_s_per_token2=self.prefill_s_per_token2 * prefill,
            recompute_base_s=self.recompute_base_s * prefill,
            recompute_s_per_token=self.recompute_s_per_token * prefill,
            decode_base_s=self.decode_base_s * decode,
            decode_s_per_sequence=self.decode_s_per_sequence * decode,
            decode_s_per_context_token=self.decode_s_per_context_token * decode,
            restore_base_s=self.restore_base_s * restore,
            restore_s_per_token=self.restore_s_per_token * restore,
            swap_s_per_token=self.swap_s_per_token * restore,
            d2d_switch_s=self.d2d_switch_s * switch,
            h2d_switch_s=self.h2d_switch_s * switch,
            open_s=self.open_s * switch,
            page_tokens=self.page_tokens,
        )
