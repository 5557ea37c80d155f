"""Round planning: Eq. 3 (length), Eq. 4 (protected decode) and Eq. 5 (bound), as pure functions over a view."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from talaria.policy.instance import EngineView, ModelView
from talaria.policy.knobs import Knobs
from talaria.policy.predict import admission_s
from talaria.policy.snapshot import ABSENT

_MIN_SHARE = 0.25  # of the bound: what an overrun leaves the next round in any case


class SlotPlan(NamedTuple):
    """One model's part of a round, in seconds."""

    model: str
    switch_s: float
    protected_steps: int
    """d_m (Eq. 4)."""
    demand_s: float
    """Predicted prefill and protected decode of the work that waits now."""


class RoundPlan(NamedTuple):
    """Models in their order; ``predicted_s`` is Eq. 3 for the work known at the start."""

    slots: tuple[SlotPlan, ...]
    bound_s: float
    """γ·T_TTFT (Eq. 5)."""
    length_s: float
    """What this round may last: the bound less the previous round's overrun, but a quarter of it at the least."""
    predicted_s: float
    infeasible: bool


def has_work(model: ModelView) -> bool:
    return bool(model.waiting or model.held or model.running)


def busy_models(view: EngineView) -> list[str]:
    """The models that have work here, in order of registration."""
    return [name for name, model in view.models.items() if model.waiting or model.held or model.running]


def activation_s(view: EngineView, name: str) -> float:
    """Predicted seconds until ``name`` could run here: 0 if active, else a switch at its coverage, or a full open."""
    model = view.models[name]
    if view.active == name:
        return 0.0
    if model.residency is ABSENT:
        return model.timing.open_s
    return model.timing.switch_s(model.coverage)


def step_s(model: ModelView, extra: int = 0, extra_context_tokens: int = 0) -> float:
    """t_D,m: the predicted decode step with all in-flight calls of the model, and ``extra`` more, in the batch."""
    batch, context = extra, extra_context_tokens
    for calls in (model.running, model.held):
        if calls:
            for item in calls.values():
                batch += 1
                context += item.call.prompt_tokens + item.generated_tokens
    return model.timing.step_s(batch or 1, context)


def queued_work_s(model: ModelView) -> float:
    """Predicted prefill and restore seconds of the calls that wait for the model."""
    work_s = 0.0
    for item in model.waiting.values():
        work_s += admission_s(model.timing, item)
    return work_s


def protected_steps(round_s: float, t_tpot_s: float) -> int:
    """d_m = ceil(R / T_TPOT): the decode iterations that keep the average cadence at T_TPOT (Eq. 4)."""
    return max(1, math.ceil(round_s / t_tpot_s - 1e-9))


def round_order(view: EngineView, knobs: Knobs, *, continuing: bool) -> list[str]:
    """The models of the next round, first to last.

    ``stable`` keeps registration order as a cycle, so that every model's revisit time is the same; a round that starts
    on an idle instance begins with the active model instead, which saves a switch. ``oldest`` serves the model whose
    oldest call has waited longest first.
    """
    models = view.models
    wanted = busy_models(view)
    if wanted and knobs.visit_idle:
        wanted = [name for name, model in models.items() if name in wanted or model.residency is not ABSENT]
    if knobs.round_order == "oldest":
        return sorted(wanted, key=lambda name: _oldest_arrival_s(models[name]))
    if view.active is None or len(wanted) < 2:
        return wanted
    names = list(models)
    first = names.index(view.active) + continuing
    return [name for name in names[first:] + names[:first] if name in wanted]


def plan_round(view: EngineView, order: Sequence[str], knobs: Knobs, overrun_s: float = 0.0, last_other_s: float = 0.0) -> RoundPlan:
    """Predict the round over ``order`` (Eq. 3), give it its protected steps (Eq. 4) and check it (Eq. 5).

    An overrun of the previous round shortens this one. ``last_other_s`` is what the round that has just ended lasted beside decode; 0
    if the instance has been idle since. Where protected decode and switches alone are longer than the round may be, or a decode step is
    slower than T_TPOT, the plan is marked infeasible: the shortfall is reported, not hidden.
    """
    bound_s = knobs.gamma * knobs.t_ttft_s
    length_s = max(bound_s - overrun_s, _MIN_SHARE * bound_s)
    switches_s = _switches_s(view, order)
    queued_s = {name: queued_work_s(view.models[name]) for name in order}
    steps = _round_steps(view, order, math.fsum(switches_s), queued_s, knobs, last_other_s)
    protected_s = switch_total_s = predicted_s = 0.0
    infeasible = False
    slots = []
    for name, switch_s in zip(order, switches_s, strict=True):
        model = view.models[name]
        one_step_s = step_s(model)
        decode_s = steps * one_step_s if has_work(model) else 0.0
        demand_s = queued_s[name] + decode_s
        slots.append(SlotPlan(name, switch_s, steps, demand_s))
        infeasible |= one_step_s >= knobs.t_tpot_s
        protected_s += decode_s
        switch_total_s += switch_s
        predicted_s += switch_s + demand_s
    infeasible |= protected_s + switch_total_s > length_s
    return RoundPlan(tuple(slots), bound_s, length_s, predicted_s, infeasible)


def _round_steps(
    view: EngineView, order: Sequence[str], switches_s: float, queued_s: Mapping[str, float], knobs: Knobs, last_other_s: float = 0.0
) -> int:  # fmt: skip
    """d_m for the round that it makes itself: R = U + d_m·Σ t_D and d_m = ceil(R / T_TPOT) together (Eq. 3, 4).

    Prefill that arrives while the round runs is unknown at its start; the last round tells what that comes to, so U is at least as
    long. Beyond γ·T_TTFT decode does not stretch a round further, and of a queue counts no more than such a round could hold. A
    single model keeps nobody waiting: its round may be as long as the bound.
    """
    bound_s, t_tpot_s = knobs.gamma * knobs.t_ttft_s, knobs.t_tpot_s
    if len(order) < 2:
        return protected_steps(bound_s, t_tpot_s)
    other_s, share = switches_s, 0.0
    for name in order:
        model = view.models[name]
        if has_work(model):
            other_s += min(queued_s[name], bound_s)
            share += step_s(model) / t_tpot_s
    other_s = max(other_s, min(last_other_s, switches_s + len(order) * bound_s))
    round_s = other_s + share * bound_s
    if share < 1.0:
        round_s = min(round_s, other_s / (1.0 - share))
    return protected_steps(round_s, t_tpot_s)


def round_load_s(view: EngineView, order: Sequence[str], queued_s: Mapping[str, float], knobs: Knobs) -> float:
    """What ``plan_round`` would predict, given every model's ``queued_work_s``: snapshots need no more of the plan."""
    load_s = 0.0
    switches_s = _switches_s(view, order)
    steps = _round_steps(view, order, math.fsum(switches_s), queued_s, knobs)
    for name, switch_s in zip(order, switches_s, strict=True):
        model = view.models[name]
        decode_s = steps * step_s(model) if has_work(model) else 0.0
        load_s += switch_s + (queued_s[name] + decode_s)
    return load_s


def slot_budget_s(view: EngineView, plan: RoundPlan, position: int, left_s: float, knobs: Knobs) -> float:
    """What the slot at ``position`` may use of the ``left_s`` seconds that its round has left (Eq. 3, 5).

    The switches still to come are paid first; the rest is shared among the models from here on that have work now, in
    equal parts or by predicted demand (``round_share``): what earlier slots left unused serves the later ones. A slot
    keeps its protected decode in any case.
    """
    here = plan.slots[position]
    model = view.models[here.model]
    later = []
    switches_s = 0.0
    for slot in plan.slots[position + 1 :]:
        switches_s += slot.switch_s
        if has_work(view.models[slot.model]):
            later.append(slot)
    left_s -= switches_s
    share = 1.0 / (1 + len(later))
    if knobs.round_share == "demand" and later:
        demands_s = [_demand_s(view.models[slot.model], slot.protected_steps) for slot in (here, *later)]
        share = demands_s[0] / sum(demands_s)
    protected_s = here.protected_steps * step_s(model) if has_work(model) else 0.0
    share_s = left_s * share
    return share_s if share_s > protected_s else protected_s


def _demand_s(model: ModelView, protected_steps: int) -> float:
    return queued_work_s(model) + protected_steps * step_s(model)


def _switches_s(view: EngineView, order: Sequence[str]) -> list[float]:
    """Predicted switch into each model of the round; none into the active one where it comes first."""
    switches_s = [activation_s(view, name) for name in order]
    if view.active is not None and view.active in order[1:]:  # by then others have run
        switches_s[order.index(view.active)] = view.models[view.active].timing.h2d_switch_s
    return switches_s


def _oldest_arrival_s(model: ModelView) -> float:
    arrivals = [item.arrived_s for calls in (model.waiting, model.held) for item in calls.values()]
    return min(arrivals, default=math.inf)
