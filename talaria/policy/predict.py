"""What a policy believes about latency: a profile's timing, corrected by what rounds actually took (SPEC §3.5).

The belief starts from a profile and is refreshed by an exponentially weighted moving average of the ratio between actual
and predicted seconds, separately for prefill (with restore), decode and switches. Truth never enters here.
"""

from __future__ import annotations

from talaria.policy.instance import CallView, RoundSummary
from talaria.policy.timing import Timing

_MAX_RATIO = 4.0  # one odd round (a stall, a restart) must not move a belief further than this


def split_prompt(call: CallView) -> tuple[int, int, int, int]:
    """(device, host, recomputed, new) tokens of the call's prompt; they always add up to the prompt."""
    device, host, request = call.device_tokens, call.host_tokens, call.call
    lost = request.reusable_tokens - device - host
    if lost < 0:
        lost = 0
    return device, host, lost, request.prompt_tokens - device - host - lost


def admission_s(timing: Timing, call: CallView) -> float:
    """Predicted seconds of restore and prefill if ``call`` were admitted now (Eq. 3's T_prefill + T_restore)."""
    device, host, lost, new = split_prompt(call)
    prefill_s = timing.prefill_s(new, device + host, lost)
    return timing.restore_s(host) + prefill_s if host else prefill_s


class Predictor:
    """Beliefs about every model of one instance."""

    def __init__(self, profiles: dict[str, Timing], alpha: float) -> None:
        self._profiles = dict(profiles)
        self.alpha = alpha
        self._scale = {model: [1.0, 1.0, 1.0] for model in profiles}
        self._timing = dict(profiles)

    def timing(self, model: str) -> Timing:
        return self._timing[model]

    def observe(self, summary: RoundSummary) -> None:
        """Fold one round summary in."""
        for slot in summary.slots:
            scale = self._scale[slot.model]
            moved = False
            for kind, actual_s, predicted_s in (
                (0, slot.prefill_s, slot.prefill_predicted_s),
                (1, slot.decode_s, slot.decode_predicted_s),
                (2, slot.switch_s, slot.switch_predicted_s),
            ):
                if actual_s > 0.0 and predicted_s > 0.0:
                    ratio = actual_s / predicted_s
                    ratio = _MAX_RATIO if ratio > _MAX_RATIO else 1.0 / _MAX_RATIO if ratio < 1.0 / _MAX_RATIO else ratio
                    scale[kind] *= 1.0 + self.alpha * (ratio - 1.0)
                    moved = True
            if moved:
                prefill, decode, switch = scale
                self._timing[slot.model] = self._profiles[slot.model].scaled(prefill=prefill, restore=prefill, decode=decode, switch=switch)
