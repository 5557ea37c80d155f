"""The figures of a run and of a comparison. Each takes records and returns a matplotlib Figure.

``Runs`` maps a configuration's name to its records, one per seed; a figure of one run has one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from talaria.report.measured import Array, measured, window_began_s
from talaria.report.metrics import GIB, OPEN
from talaria.report.record import PATHS, RunRecord
from talaria.report.style import ACTIVITIES, INK, MEMORY_COLOURS, PATH_COLOURS, SERIES, panels, styled
from talaria.workload.stats import nearest_rank

Runs = Mapping[str, Sequence[RunRecord]]

MOST_POINTS = 400
"""More points than this make a curve larger on disk and no clearer on screen."""
MOST_BARS = 80


@styled
def latency_cdfs(runs: Runs) -> Any:
    """SCT of completed sessions and schedule-aware TTFT of completed calls as cumulative shares, all seeds pooled."""
    figure, (sessions, calls) = panels(2)
    for colour, (config, records) in zip(_colours(runs), runs.items(), strict=True):
        windows = [measured(record) for record in records]
        _cdf(sessions, [window.sessions.completed for window in windows], colour, config)
        _cdf(calls, [window.ttft_s[window.completed] for window in windows], colour, config if len(runs) > 1 else "all calls")
        if len(runs) == 1:
            returns = [window.ttft_s[window.completed & window.returns] for window in windows]
            _cdf(calls, returns, SERIES[1], "returns only", dashed=True)
    sessions.set(title="Session completion time", xlabel="SCT, s", ylabel="share of sessions")
    calls.set(title="Time to first token", xlabel="TTFT, schedule-aware, s", ylabel="share of calls")
    for axes in (sessions, calls):
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
        axes.set_ylim(0, 1.02)
    _legend(sessions if len(runs) > 1 else calls, loc="lower right")
    return figure


@styled
def sct_by_configuration(runs: Runs) -> Any:
    """One row per configuration: every session's SCT as a dot, quartiles as a box, the median in figures."""
    figure, (axes,) = panels(height_in=0.9 + 0.52 * max(len(runs), 2))
    labels = list(runs)
    for row, (colour, config) in enumerate(zip(_colours(runs), labels, strict=True)):
        scts_s = _pooled([measured(record).sessions.completed for record in runs[config]])
        if len(scts_s) == 0:
            continue
        shown_s = _thinned(np.sort(scts_s))
        # Dots are spread by rank, not by chance: the same run is the same picture.
        jitter = ((np.arange(len(shown_s)) * 0.618) % 1.0 - 0.5) * 0.5
        axes.scatter(shown_s, row + jitter, s=9, color=colour, alpha=0.35, linewidths=0)
        low_s, first_s, median_s, third_s, high_s = (nearest_rank(np.sort(scts_s).tolist(), percent) for percent in (5, 25, 50, 75, 95))
        axes.bxp(
            [{"whislo": low_s, "q1": first_s, "med": median_s, "q3": third_s, "whishi": high_s}],
            positions=[row],
            orientation="horizontal",
            widths=0.56,
            showfliers=False,
            medianprops={"color": INK, "linewidth": 2},
            boxprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        label = f"{median_s:,.0f} s" if median_s >= 100 else f"{median_s:.3g} s"
        axes.annotate(label, (median_s, row - 0.34), ha="center", va="bottom", fontsize=8.5)
    what = "SCT, s (sessions of all seeds together; box: quartiles, whiskers: 5 % and 95 %)"
    axes.set(title="Session completion time by configuration", xlabel=what, xscale="log")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.35, -0.7)
    axes.tick_params(axis="y", labelcolor=INK)
    _plain_log(axes.xaxis)
    return figure


@styled
def round_composition(record: RunRecord, bound_s: float | None = None) -> Any:
    """What rounds are spent on over the run: bars stack to the mean round length of their stretch of time.

    ``bound_s`` draws the round bound γ·T_TTFT (SPEC §4.4).
    """
    figure, (axes,) = panels()
    starts_s, parts = _round_parts(record)
    if len(starts_s):
        bars = _bar_count(starts_s, np.sum(list(parts.values()), axis=0))
        edges_s = np.linspace(starts_s.min(), np.nextafter(starts_s.max(), np.inf), bars + 1)
        place = np.clip(np.searchsorted(edges_s, starts_s, side="right") - 1, 0, bars - 1)
        count = np.maximum(np.bincount(place, minlength=bars), 1)
        bottom = np.zeros(bars)
        for name, values_s in parts.items():
            height = np.bincount(place, weights=values_s, minlength=bars) / count
            if height.sum() > 1e-3 * (bottom.sum() + height.sum()):
                axes.stairs(bottom + height, edges_s, baseline=bottom, fill=True, color=ACTIVITIES[name], label=name, linewidth=0)
            bottom += height
        if bound_s is not None:
            axes.axhline(bound_s, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="round bound")
        _legend_beside(axes)
    axes.set(title="Round composition", xlabel="time, s", ylabel="mean seconds per round")
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.01)
    return figure


@styled
def switch_latency(runs: Runs) -> Any:
    """Duration of logical switches as cumulative shares, and the paths they took, opens excluded."""
    figure, (latency, mix) = panels(2, widths=(1.15, 1.0))
    labels = list(runs)
    for row, (colour, config) in enumerate(zip(_colours(runs), labels, strict=True)):
        windows = [measured(record) for record in runs[config]]
        kept = [window.switch_total_s[window.switch_path != OPEN] for window in windows]
        _cdf(latency, kept, colour, config)
        paths = _pooled([window.switch_path for window in windows])
        total, left = np.count_nonzero(paths != OPEN), 0.0
        for path, path_colour in PATH_COLOURS.items():
            share = np.count_nonzero(paths == PATHS.index(path)) / total if total else 0.0
            mix.barh(row, share, left=left, height=0.6, color=path_colour, label=path if row == 0 else None)
            if share >= 0.07:
                mix.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=9)
            left += share
    latency.set(title="Switch latency", xlabel="slowest rank, s", ylabel="share of switches", ylim=(0, 1.02))
    latency.set_xlim(left=0)
    mix.set(title="Switch path", xlabel="share of switches", xlim=(0, 1))
    mix.set_yticks(range(len(labels)), labels)
    mix.tick_params(axis="y", labelcolor=INK)
    margin = 0.6 if len(labels) > 1 else 1.2
    mix.set_ylim(len(labels) - 1 + margin, -margin)
    mix.grid(axis="y", visible=False)
    mix.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    if len(runs) > 1:
        _legend(latency, loc="lower right")
    return figure


@styled
def hbm_footprint(record: RunRecord) -> Any:
    """Weights, KV and staged weights per GPU over time, on the instance whose footprint grows largest, and what is reserved."""
    figure, (axes,) = panels()
    samples = record.hbm_samples
    if samples is not None and len(samples):
        parts = {"weights": samples["weights_bytes"], "KV": samples["kv_bytes"], "staged": samples["staged_bytes"]}
        total = np.sum([values.astype(float) for values in parts.values()], axis=0)
        instance = samples["instance"][np.argmax(total)]
        rows = np.flatnonzero(samples["instance"] == instance)
        rows = rows[_peaks(total[rows])]
        stacks = [values[rows] / GIB for values in parts.values()]
        axes.stackplot(samples["time_s"][rows], *stacks, labels=list(parts), colors=list(MEMORY_COLOURS.values()), step="post", linewidth=0)
        axes.axhline(record.peak_hbm_bytes / GIB, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="reserved")
        _legend_beside(axes)
        axes.set_title(f"Memory of one GPU of {record.instances[instance]}")
    axes.set(xlabel="time, s", ylabel="HBM, GiB", ylim=(0, None))
    axes.margins(x=0.01)
    return figure


def _colours(runs: Runs) -> list[str]:
    return [SERIES[number % len(SERIES)] for number in range(len(runs))]


def _pooled(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def _thinned(ascending: Array) -> Array:
    if len(ascending) <= MOST_POINTS:
        return ascending
    picked: Array = ascending[np.linspace(0, len(ascending) - 1, MOST_POINTS).astype(int)]
    return picked


def _bar_count(starts_s: Array, wall_s: Array) -> int:
    """As many bars as leave none empty while rounds follow each other: no bar is shorter than a round."""
    span_s = float(starts_s.max() - starts_s.min())
    return int(np.clip(span_s / max(float(wall_s.max()), 1e-9), 1, MOST_BARS))


def _peaks(values: Array) -> Array:
    """Positions that keep the outline of ``values`` at MOST_POINTS points: the largest value of each stretch."""
    edges = np.unique(np.linspace(0, len(values), MOST_POINTS + 1).astype(int))
    return np.array([start + int(np.argmax(values[start:end])) for start, end in pairwise(edges)])


def _cdf(axes: Any, parts: Sequence[Array], colour: str, label: str, *, dashed: bool = False) -> None:
    values = np.sort(_pooled(parts))
    if len(values) == 0:
        return
    shares = np.arange(1, len(values) + 1) / len(values)
    axes.step(_thinned(values), _thinned(shares), where="post", color=colour, label=label, linestyle="--" if dashed else "-")


def _round_parts(record: RunRecord) -> tuple[Array, dict[str, Array]]:
    """Start of every measured round and its seconds by activity; slots are matched by (instance, round)."""
    rounds, slots = record.rounds, record.slots
    keys = rounds["instance"].astype(np.int64) << 32 | rounds["round"]
    order = np.argsort(keys, kind="stable")
    slot_keys = slots["instance"].astype(np.int64) << 32 | slots["round"]
    found = np.searchsorted(keys[order], slot_keys)
    known = found < len(keys)
    known[known] = keys[order][found[known]] == slot_keys[known]
    row = order[found[known]]
    parts = {
        name: np.bincount(row, weights=slots[column][known], minlength=len(keys))
        for name, column in (("P", "prefill_s"), ("SP", "sp_s"), ("decode", "decode_s"), ("linger", "linger_s"))
    }
    parts["switch"] = rounds["switch_s"]
    parts["other"] = np.maximum(rounds["wall_s"] - np.sum(list(parts.values()), axis=0), 0.0)
    measured_rows = rounds["started_s"] >= window_began_s(record)
    return rounds["started_s"][measured_rows], {name: values[measured_rows] for name, values in parts.items()}


def _plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers: 0.5, 1, 20; only powers of ten where there are many decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    crowded = low > 0 and high > 300 * low
    axis.set_major_locator(LogLocator(subs=(1.0,) if crowded else (1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(axes: Any, **place: Any) -> None:
    """A legend where there is something to explain: a run without calls still gets its page."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, **place)


def _legend_beside(axes: Any) -> None:
    """A legend to the right, in the order in which the bars or areas stack."""
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
