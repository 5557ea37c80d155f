"""Round planning: Eq. 3 (length), Eq. 4 (protected decode) and Eq. 5 (bound), as pure functions over a view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from talaria.policy.instance import EngineView, ModelView
from talaria.policy.knobs import Knobs
from talaria.policy.predict import admission_s
from talaria.policy.snapshot import Residency

_MIN_SHARE = 0.25  # an overrun never takes more than the rest of this share of the next round's bound


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One model's part of a round, in seconds."""

    model: str
    switch_s: float
    budget_s: float
    """P, SP and decode together, without the switch."""
    protected_steps: int
    """d_m (Eq. 4)."""
    demand_s: float
    """Predicted prefill and protected decode of the work that waits now."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Models in their order; ``predicted_s`` is Eq. 3 for the work known at the start."""

    slots: tuple[SlotPlan, ...]
    bound_s: float
    predicted_s: float
    infeasible: bool


def has_work(model: ModelView) -> bool:
    return bool(model.waiting or model.held or model.running)


def activation_s(view: EngineView, name: str) -> float:
    """Predicted seconds until ``name`` could run here: 0 if active, else a switch at its coverage, or a full open."""
    model = view.models[name]
    if view.active == name:
        return 0.0
    if model.residency is Residency.ABSENT:
        return model.timing.open_s
    return model.timing.switch_s(model.coverage)


def step_s(model: ModelView, extra: int = 0, extra_context_tokens: int = 0) -> float:
    """t_D,m: the predicted decode step with all in-flight calls of the model, and ``extra`` more, in the batch."""
    context = extra_context_tokens
    for calls in (model.running, model.held):
        for item in calls.values():
            context += item.call.prompt_tokens + item.generated_tokens
    batch = len(model.running) + len(model.held) + extra
    return model.timing.step_s(max(1, batch), context)


def queued_work_s(model: ModelView) -> float:
    """Predicted prefill and restore seconds of the calls that wait for the model."""
    return sum(admission_s(model.timing, item) for item in model.waiting.values())


def protected_steps(round_s: float, t_tpot_s: float) -> int:
    """d_m = ceil(R / T_TPOT): the decode iterations that keep the average cadence at T_TPOT (Eq. 4)."""
    return max(1, math.ceil(round_s / t_tpot_s - 1e-9))


def round_order(view: EngineView, knobs: Knobs, *, continuing: bool) -> list[str]:
    """The models of the next round, first to last.

    ``stable`` keeps registration order as a cycle, so that every model's revisit time is the same; a round that starts
    on an idle instance begins with the active model instead, which saves a switch. ``oldest`` serves the model whose
    oldest call has waited longest first.
    """
    names = list(view.models)
    wanted = [name for name in names if has_work(view.models[name])]
    if knobs.visit_idle and wanted:
        wanted = [name for name in names if has_work(view.models[name]) or view.models[name].residency is not Residency.ABSENT]
    if not wanted:
        return []
    if knobs.round_order == "oldest":
        return sorted(wanted, key=lambda name: (_oldest_arrival_s(view.models[name]), names.index(name)))
    if view.active is None:
        return wanted
    first = names.index(view.active) + (1 if continuing else 0)
    return sorted(wanted, key=lambda name: (names.index(name) - first) % len(names))


def plan_round(view: EngineView, order: Sequence[str], knobs: Knobs, overrun_s: float = 0.0) -> RoundPlan:
    """Share the round bound among ``order`` (Eq. 3-5).

    Every switch of the round is paid first; the rest is shared in equal parts or by predicted demand
    (``round_share``). An overrun of the previous round shortens this one. Where protected decode and switches alone
    pass the bound, or a decode step is slower than T_TPOT, the plan is marked infeasible and each slot keeps its
    protected decode: the shortfall is reported, not hidden.
    """
    full_bound_s = knobs.gamma * knobs.t_ttft_s
    bound_s = max(full_bound_s - overrun_s, _MIN_SHARE * full_bound_s)
    steps = protected_steps(full_bound_s, knobs.t_tpot_s)
    switches_s = _switches_s(view, order)
    protected_s, demand_s = {}, {}
    infeasible = False
    for name in order:
        model = view.models[name]
        decode_s = step_s(model)
        in_flight = model.waiting or model.held or model.running
        protected_s[name] = steps * decode_s if in_flight else 0.0
        demand_s[name] = queued_work_s(model) + protected_s[name]
        infeasible |= decode_s >= knobs.t_tpot_s
    left_s = bound_s - sum(switches_s.values())
    infeasible |= sum(protected_s.values()) > left_s
    slots = tuple(
        SlotPlan(name, switches_s[name], max(_share_s(name, order, demand_s, left_s, knobs), protected_s[name]), steps, demand_s[name])
        for name in order
    )
    predicted_s = sum(slot.switch_s + min(slot.budget_s, slot.demand_s) for slot in slots)
    return RoundPlan(slots, full_bound_s, predicted_s, infeasible)


def _share_s(name: str, order: Sequence[str], demand_s: dict[str, float], left_s: float, knobs: Knobs) -> float:
    if knobs.round_share == "demand":
        total = sum(demand_s.values())
        if total > 0.0:
            return left_s * demand_s[name] / total
    return left_s / len(order)


def _switches_s(view: EngineView, order: Sequence[str]) -> dict[str, float]:
    """Predicted switch into each model of the round; the first is free if it is active now."""
    only = len(order) == 1
    switches = {}
    for position, name in enumerate(order):
        if name == view.active and (only or position == 0):
            switches[name] = 0.0
        elif name == view.active:
            switches[name] = view.models[name].timing.switch_s(view.models[name].coverage)
        else:
            switches[name] = activation_s(view, name)
    return switches


def _oldest_arrival_s(model: ModelView) -> float:
    arrivals = [item.arrived_s for calls in (model.waiting, model.held) for item in calls.values()]
    return min(arrivals, default=math.inf)
