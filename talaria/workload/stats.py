"""What kind of work a trace is: the regime table of SPEC §1 for any workload, in one pass over its sessions."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from talaria.workload.rules import by_calls
from talaria.workload.session import TraceCall, Workload


def nearest_rank(sorted_values: Sequence[float], percent: float) -> float:
    """The observation at rank ceil(percent·N/100) of an ascending sample: the project's only percentile (SPEC §1).

    ``percent`` in (0, 100]. Raises ValueError for an empty sample or a percentage outside.
    """
    if not 0.0 < percent <= 100.0:
        raise ValueError(f"percent = {percent}, allowed: above 0, at most 100")
    if len(sorted_values) == 0:
        raise ValueError("percentile of an empty sample")
    # Products like 99.9·1000/100 land a rounding error above the whole rank they stand for.
    rank = math.ceil(percent * len(sorted_values) / 100.0 - 1e-9)
    return sorted_values[rank - 1]


PUBLISHED: dict[str, Any] = {
    "sessions": 445,
    "calls": 7386,
    "depth": {"p50": 11, "p95": 49, "max": 187},
    "gap_s": {"p50": 0.39, "p95": 1.32},
    "prompt_tokens": {"p50": 25_000, "p95": 105_000},
    "reusing_over_half": 0.968,
}
"""The published regime in the shape of ``regime``'s answer (SPEC §1)."""


def regime(workload: Workload) -> dict[str, Any]:
    """Sizes and distributions of ``workload``: counts, and p50, p95 and max by nearest rank.

    ``depth`` is calls per session over all its lines. ``gap_s`` is over calls that wait for another, and
    ``gaps_from_10_s`` the share of those of at least 10 s. ``reusing_over_half`` is the share of continuations whose
    reused tokens exceed half of the line's previous prompt and response (SPEC §6). ``start_span_s`` is the time from the
    first session's start to the last one's. What has no observations is ``None``.
    """
    calls: Counter[str] = Counter()
    depths, gaps, prompts, outputs = array("q"), array("d"), array("q"), array("q")
    lines = continuations = over_half = 0
    first_s = last_s = None
    for session in workload.sessions():
        depths.append(len(session.calls))
        if session.start_s is not None:
            first_s, last_s = session.start_s if first_s is None else first_s, session.start_s
        previous: dict[str, TraceCall] = {}
        for call in session.calls:
            calls[call.model] += 1
            prompts.append(call.prompt_tokens)
            outputs.append(call.output_tokens)
            if call.waits_for:
                gaps.append(call.gap_s)
            if (last := previous.get(call.line)) is not None:
                continuations += 1
                over_half += 2 * call.reuse_tokens > last.prompt_tokens + last.output_tokens
            previous[call.line] = call
        lines += len(previous)
    return {
        "sessions": len(depths),
        "lines": lines,
        "calls": len(prompts),
        "models": by_calls(calls),
        "depth": _spread(depths),
        "gap_s": {"n": len(gaps), **_spread(gaps)},
        "gaps_from_10_s": sum(gap >= 10.0 for gap in gaps) / len(gaps) if gaps else None,
        "prompt_tokens": _spread(prompts),
        "output_tokens": _spread(outputs),
        "continuations": continuations,
        "reusing_over_half": over_half / continuations if continuations else None,
        "start_span_s": last_s - first_s if first_s is not None and last_s is not None else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {name: nearest_rank(ordered, percent) if ordered else None for name, percent in (("p50", 50), ("p95", 95), ("max", 100))}


def render(table: Mapping[str, Any]) -> str:
    """``regime``'s answer as text: one row per quantity, the published regime beside it."""
    rows = [("quantity", "here", "published")]
    for name, value in table.items():
        published = PUBLISHED.get(name)
        if isinstance(value, dict):
            beside = published if isinstance(published, dict) else {}
            rows += [(f"{name} {key}", _text(item), _text(beside.get(key))) for key, item in value.items()]
        else:
            rows.append((name, _text(value), _text(published)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"{name:<{widths[0]}}  {here:>{widths[1]}}  {beside:>{widths[2]}}".rstrip() for name, here, beside in rows)


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
