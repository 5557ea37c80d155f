"""Why the latest calls went where they went, without letting the explanations hold up the calls."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

from talaria.policy.calls import Call
from talaria.policy.explain import Explanation
from talaria.policy.router import Overloaded, Routed, Router

EXPLAINED: Final = 256
"""Placements whose reasons are kept."""
SHARE: Final = 0.02
"""Of the event loop's time, at the most: with many instances an explanation costs many times the placement."""
SAVED_S: Final = 0.1


class Placement(NamedTuple):
    """Why a call went where it went."""

    call: int
    tenant: str
    session: str
    line: str
    attempt: int
    explanation: Explanation | None
    """None: too many placements at once to explain them all."""
    answer: str
    """The instance, or the overload policy's action and its reason."""


class Explainer:
    """Explains every placement, as long as that takes no more than its share of the event loop and what it had saved of it."""

    def __init__(self) -> None:
        self.kept: deque[Placement] = deque(maxlen=EXPLAINED)
        self._left_s, self._as_of = SAVED_S, time.perf_counter()

    def explain(self, router: Router, call: Call, now_s: float) -> Explanation | None:
        """What ``router`` would do with the call and why; to be asked before it does."""
        began = time.perf_counter()
        self._left_s = min(SAVED_S, self._left_s + (began - self._as_of) * SHARE)
        self._as_of = began
        if self._left_s <= 0.0:
            return None
        explanation = router.explain(call, now_s)
        self._left_s -= time.perf_counter() - began
        return explanation

    def keep(self, number: int, attempt: int, call: Call, explanation: Explanation | None, decision: Routed | Overloaded) -> None:
        answer = decision.instance if isinstance(decision, Routed) else f"{decision.action}: {decision.reason}"
        self.kept.append(Placement(number, call.key.tenant, call.key.session, call.key.line, attempt, explanation, answer))
