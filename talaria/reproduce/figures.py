"""The published figures drawn from simulated runs; those that any comparison has come from ``talaria.report.figures``.

Crosses are published values. Distributions pool all seeds; bars are means over seeds with 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from talaria.report import figures
from talaria.report.measured import Array, measured
from talaria.report.record import RunRecord
from talaria.report.statistics import Estimate, over_seeds
from talaria.report.style import ACTIVITIES, INK, SERIES, panels, styled
from talaria.report.sweep_figures import SWEEP_PANELS, sweep_tradeoff
from talaria.reproduce.experiments import LOADS, REPLAY, ROUTERS, TAU_SWEEP, TAUS, Experiment, Findings
from talaria.reproduce.measures import Draw

Marks = Mapping[tuple[Experiment, str], float]
"""Published values by experiment and metric."""

MOST_POINTS = 400


def runs_of(found: Findings, scenario: str, configs: Sequence[str]) -> dict[str, list[RunRecord]]:
    """The records of several configurations on one scenario, as the figures of ``report`` take them."""
    return {config: found.records[Experiment(scenario, config)] for config in configs}


@styled
def regime(draws: Sequence[Draw], published: Mapping[str, Mapping[str, float]]) -> Any:
    """Depth of sessions, gaps and prompts of the generated corpus as cumulative shares; ``published`` percentiles by panel."""
    figure, axes_of = panels(3)
    shown = (
        ("depth", "calls a session", (1, 10, 100), [draw.depths for draw in draws]),
        ("gap_s", "gap, s", (0.1, 1, 10, 100), [draw.gaps_s for draw in draws]),
        ("prompt_tokens", "prompt, tokens", (20_000, 50_000, 100_000), [draw.prompt_tokens for draw in draws]),
    )
    for axes, (name, label, ticks, parts) in zip(axes_of, shown, strict=True):
        _cdf(axes, parts, SERIES[0])
        for percentile, value in published[name].items():
            _mark(axes, value, {"p50": 0.5, "p95": 0.95, "max": 1.0}[percentile])
        axes.set(xlabel=label, ylim=(0, 1.03))
        _log_axis(axes, ticks)
    axes_of[0].set(title="Regime of the generated corpus", ylabel="share")
    return figure


@styled
def latency(found: Findings, configs: Sequence[str], marks: Marks) -> Any:
    """SCT and TTFT of the five configurations as cumulative shares, with the published percentiles."""
    figure = figures.latency_cdfs(runs_of(found, REPLAY, configs))
    for axes, metric in zip(figure.axes, ("sct", "ttft"), strict=True):
        for number, config in enumerate(configs):
            for percent in (50, 95):
                value = marks.get((Experiment(REPLAY, config), f"{metric}_p{percent}_s"))
                if value is not None:
                    _mark(axes, value, percent / 100, SERIES[number])
    return figure


@styled
def placement_ttft(found: Findings, marks: Marks) -> Any:
    """TTFT of all calls under each router, one panel a load."""
    figure, axes_of = panels(len(LOADS))
    for axes, load in zip(axes_of, LOADS, strict=True):
        scenario = f"paper-tp4-{load}"
        for number, router in enumerate(ROUTERS):
            windows = [measured(record) for record in found.records[Experiment(scenario, router)]]
            _cdf(axes, [window.ttft_s[window.completed] for window in windows], SERIES[number], router)
            for percent in (50, 95):
                value = marks.get((Experiment(scenario, router), f"ttft_p{percent}_s"))
                if value is not None:
                    _mark(axes, value, percent / 100, SERIES[number])
        axes.set(title=f"{load} load", xlabel="TTFT, schedule-aware, s", ylim=(0, 1.03))
        _log_axis(axes, (0.01, 0.1, 1, 10))
    axes_of[0].set_ylabel("share of calls")
    axes_of[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


@styled
def placement_opens(found: Findings, marks: Marks) -> Any:
    """Avoidable cold opens of each router by load."""
    figure, (axes,) = panels()
    width = 0.8 / len(ROUTERS)
    for number, router in enumerate(ROUTERS):
        keys = [Experiment(f"paper-tp4-{load}", router) for load in LOADS]
        at = np.arange(len(LOADS)) + (number - (len(ROUTERS) - 1) / 2) * width
        _bars(axes, at, [found.estimate(key, "avoidable_opens") for key in keys], 0.9 * width, SERIES[number], router)
        for place, key in zip(at, keys, strict=True):
            if (value := marks.get((key, "avoidable_opens"))) is not None:
                _mark(axes, place, value)
    axes.set(title="Avoidable cold opens", ylabel="opens in 120 calls")
    axes.set_ylim(bottom=-1)
    axes.set_xticks(range(len(LOADS)), [f"{load} load" for load in LOADS])
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")
    return figure


@styled
def tau_tradeoff(found: Findings, marks: Marks) -> Any:
    """What the lease timeout trades: rates, the wait of returns, the sessions' time."""
    points = [over_seeds(found.values[Experiment(TAU_SWEEP, "talaria", tau)]) for tau in TAUS]
    figure = sweep_tradeoff("tau", "s", TAUS, points)
    for axes, (_, _, metrics) in zip(figure.axes, SWEEP_PANELS, strict=True):
        for metric, colour in zip(metrics, SERIES, strict=False):
            for tau in TAUS:
                if (value := marks.get((Experiment(TAU_SWEEP, "talaria", tau), metric))) is not None:
                    _mark(axes, tau, value, colour)
    return figure


@styled
def session_prefill(found: Findings, configs: Sequence[str]) -> Any:
    """Share of waiting returns that SP admits, and handling events a round, by configuration."""
    figure, (rate, events) = panels(2)
    at = np.arange(len(configs), dtype=float)
    keys = [Experiment(REPLAY, config) for config in configs]
    _bars(rate, at, [found.estimate(key, "sp_admission_rate") for key in keys], 0.6, SERIES[0], "admitted")
    for offset, name, colour in ((-0.2, "admitted", SERIES[2]), (0.2, "deferred", SERIES[5])):
        _bars(events, at + offset, [found.estimate(key, f"events_per_round_{name}") for key in keys], 0.36, colour, name)
    rate.set(title="SP admission rate", ylabel="admitted / handling events", ylim=(0, 1.02))
    events.set(title="Handling events a round", ylabel="events a round")
    events.legend(loc="upper left")
    for axes in (rate, events):
        axes.set_xticks(at, configs, rotation=15)
        axes.set_ylim(bottom=0)
        axes.grid(axis="x", visible=False)
    return figure


@styled
def rounds_together(found: Findings, configs: Sequence[str]) -> Any:
    """Seconds of all rounds of a run by activity, mean over seeds."""
    figure, (axes,) = panels(height_in=0.9 + 0.62 * max(len(configs), 2))
    for row, config in enumerate(configs):
        parts = [_activities(record) for record in found.records[Experiment(REPLAY, config)]]
        left = 0.0
        for name, colour in ACTIVITIES.items():
            seconds = float(np.mean([part[name] for part in parts]))
            axes.barh(row, seconds, left=left, height=0.6, color=colour, label=name if row == 0 else None)
            left += seconds
    axes.set(title="Round composition, whole run", xlabel="seconds in rounds, mean over seeds")
    axes.set_yticks(range(len(configs)), configs)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(configs) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def rounds_over_time(found: Findings, config: str) -> Any:
    """Where the first seed's rounds of ``config`` went, over the run, below the round bound."""
    key = Experiment(REPLAY, config)
    knobs = found.plans[key].knobs
    figure = figures.round_composition(found.records[key][0], knobs.gamma * knobs.t_ttft_s)
    figure.axes[0].set_title(f"Round composition, {config}")
    return figure


def _activities(record: RunRecord) -> dict[str, float]:
    slots, rounds = record.slots, record.rounds
    seconds = {"P": "prefill_s", "SP": "sp_s", "decode": "decode_s", "linger": "linger_s"}
    parts = {name: float(slots[column].sum(dtype=float)) for name, column in seconds.items()}
    parts["switch"] = float(rounds["switch_s"].sum(dtype=float))
    parts["other"] = max(0.0, float(rounds["wall_s"].sum(dtype=float)) - sum(parts.values()))
    return parts


def _bars(axes: Any, at: Array, estimates: Sequence[Estimate], width: float, colour: str, label: str) -> None:
    heights = [entry.mean or 0.0 for entry in estimates]
    margins = [0.0 if entry.mean is None or entry.high is None else entry.high - entry.mean for entry in estimates]
    axes.bar(at, heights, width=width, color=colour, label=label, yerr=margins, ecolor=INK, capsize=2)


def _cdf(axes: Any, parts: Sequence[Array], colour: str, label: str | None = None) -> None:
    values = np.sort(np.concatenate(parts))
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).astype(int))
    axes.step(values[places], (places + 1) / len(values), where="post", color=colour, label=label)


def _log_axis(axes: Any, ticks: Sequence[float]) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())


def _mark(axes: Any, x: float, y: float, colour: str = INK) -> None:
    """A published value."""
    axes.plot([x], [y], marker="X", markersize=8, color=colour, markeredgecolor="white", linestyle="none", zorder=5)
