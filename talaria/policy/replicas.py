"""The replica gate: whether one more instance may open a model (SPEC §3.4, Eq. 2).

Open a fresh replica of m on j only if ``gain(m, j) > T_swap(m, j) + μ_j·ΔW_m + ν_m``. A model that no healthy instance
holds passes, since somebody must open it.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from talaria.policy.snapshot import InstanceSnapshot, ModelSnapshot

GIB = float(1 << 30)


def hbm_price_s_per_gib(snapshot: InstanceSnapshot, mu0_s_per_gib: float) -> float:
    """μ_j = μ0 · pressure² · (1 - slack share), s/GiB: convex in the used share of HBM, μ0 when full and without slack.

    Squared because the first half of the memory displaces nothing; what is left of it as clean staging slack can be
    given up without evicting a prefix, so it lowers the price in proportion.
    """
    if snapshot.hbm_capacity_bytes <= 0:
        return mu0_s_per_gib
    pressure = min(1.0, snapshot.hbm_used_bytes / snapshot.hbm_capacity_bytes)
    slack_share = min(1.0, snapshot.slack_bytes / snapshot.hbm_capacity_bytes)
    return mu0_s_per_gib * pressure * pressure * (1.0 - slack_share)


def open_price_s(snapshot: InstanceSnapshot, model: ModelSnapshot, mu0_s_per_gib: float, nu_s: float) -> float:
    """The right side of Eq. 2 in seconds: T_swap + μ_j·ΔW_m + ν_m."""
    return model.activate_s + hbm_price_s_per_gib(snapshot, mu0_s_per_gib) * (model.weight_bytes / GIB) + nu_s


class DemandWindow:
    """Calls per model that had to wait or were spilled within the last control window.

    They stand for the queued and spilled demand of the next window; the caller adds what is queued at the router, the
    live leases, and the call at hand.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._times: dict[str, deque[float]] = {}

    def record(self, model: str, now_s: float) -> None:
        """A call of ``model`` had to wait or was spilled at ``now_s``; times never go back."""
        times = self._times.setdefault(model, deque())
        times.append(now_s)
        self._prune(times, now_s)

    def calls(self, model: str, now_s: float) -> int:
        """How many were recorded after ``now_s - window``; amortised O(1)."""
        times = self._times.get(model)
        if not times:
            return 0
        self._prune(times, now_s)
        return len(times)

    def _prune(self, times: deque[float], now_s: float) -> None:
        horizon_s = now_s - self.window_s
        while times and times[0] <= horizon_s:
            times.popleft()


def gain_s(demand_calls: float, best_held_wait_s: float, wait_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds that a replica on each instance saves over the next window: demand times the wait each call is spared.

    ``best_held_wait_s``: shortest wait at a healthy instance that holds the model (inf where none does, and the gain
    with it); ``wait_s``: the wait at each instance that would open it, without the opening itself (that is T_swap).
    """
    return demand_calls * (best_held_wait_s - wait_s)
