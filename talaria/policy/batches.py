"""Which waiting calls go into the next P or SP batch: order, fairness between tenants, and the limits of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from talaria.policy.instance import CallView
from talaria.policy.predict import admission_s
from talaria.policy.timing import Timing


class Batch(NamedTuple):
    """Calls to admit together and their predicted restore and prefill seconds."""

    calls: tuple[CallView, ...]
    costs_s: tuple[float, ...]
    """Call by call."""
    cost_s: float
    oversize: bool = False
    """A single call that fits no slot even alone; it gets this one's prefill to itself (SPEC §4.1)."""


EMPTY = Batch((), (), 0.0)
_UNKNOWN_OUTPUT_TOKENS = 1024  # reserved for a call whose output length nobody knows


def is_sp_eligible(item: CallView) -> bool:
    """A continuation whose prefix is on the device or restorable here; it must also have arrived after P (SPEC §4.1)."""
    return item.call.turn > 0 and item.device_tokens + item.host_tokens > 0


def fair_order(items: Sequence[CallView]) -> Sequence[CallView]:
    """Tenants take turns, each in its own order: a tenant with many calls cannot push back one with few."""
    if len(items) == 1 or len({item.call.key.tenant for item in items}) <= 1:
        return items
    position: dict[str, int] = {}
    ranked = []
    for index, item in enumerate(items):
        tenant = item.call.key.tenant
        position[tenant] = position.get(tenant, -1) + 1
        ranked.append((position[tenant], index, item))
    ranked.sort(key=lambda entry: entry[:2])
    return [entry[2] for entry in ranked]


def choose(
    items: Iterable[CallView], timing: Timing, *, budget_s: float, free_kv_tokens: int, room: int, output_tokens: int,
    decode_steps: float = 0.0, alone_s: float | None = None, empty: bool = False,
) -> Batch:  # fmt: skip
    """Take ``items`` in order while their predicted time, KV and number fit.

    A call that does not fit in time is passed over (a later, smaller one may fit); one that does not fit in KV ends the
    batch, so that a large call is not overtaken for ever. With ``alone_s``, the seconds of prefill that a slot like this has for one
    call when nothing else is there, the first call is taken alone even if it exceeds ``budget_s``: the next slot might fit it no
    better. It is oversize if its own prefill exceeds ``alone_s`` too. With ``empty`` (nothing in flight) also if it exceeds the KV:
    only the engine can say whether it ever fits. ``free_kv_tokens`` counts idle prefixes as free, the calls' own too.
    Each call also slows the ``decode_steps`` that are promised within the budget, as far as its sequence and context do.
    """
    taken: list[CallView] = []
    costs_s: list[float] = []
    cost_s = 0.0
    slower_s, slower_s_per_token = decode_steps * timing.decode_s_per_sequence, decode_steps * timing.decode_s_per_context_token
    for item in items:
        if room <= 0:
            break
        call = item.call
        output = _UNKNOWN_OUTPUT_TOKENS if call.expected_output_tokens is None else call.expected_output_tokens
        needed = call.prompt_tokens + (output if output < output_tokens else output_tokens)
        if needed > free_kv_tokens and not (empty and not taken):
            break
        work_s = admission_s(timing, item)
        needed_s = work_s + slower_s + slower_s_per_token * call.prompt_tokens
        if needed_s > budget_s:
            if alone_s is not None and not taken:
                return Batch((item,), (work_s,), work_s, oversize=work_s > alone_s)
            continue
        room -= 1
        taken.append(item)
        costs_s.append(work_s)
        cost_s += work_s
        budget_s -= needed_s
        free_kv_tokens -= needed
    return Batch(tuple(taken), tuple(costs_s), cost_s) if taken else EMPTY
