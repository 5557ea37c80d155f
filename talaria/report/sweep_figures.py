"""The figures of a sweep: what one knob trades, and metrics over a grid of two. They take estimates over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from talaria.policy.knobs import value_text
from talaria.report.measured import Array
from talaria.report.metrics import METRICS
from talaria.report.statistics import Estimate
from talaria.report.style import INK, SERIES, panels, styled

LABELS = {
    "residency_hit": "residency hit",
    "same_instance_return": "same instance",
    "return_ttft_p50_s": "p50",
    "return_ttft_p95_s": "p95",
    "sct_p50_s": "p50",
    "sct_p95_s": "p95",
}
SWEEP_PANELS = (
    ("Residency and locality", "share", ("residency_hit", "same_instance_return")),
    ("Returns", "TTFT, schedule-aware, s", ("return_ttft_p50_s", "return_ttft_p95_s")),
    ("Sessions", "SCT, s", ("sct_p50_s", "sct_p95_s")),
)
"""Title, vertical axis and metrics of each panel of a sweep."""


@styled
def sweep_tradeoff(knob: str, unit: str, values: Sequence[Any], points: Sequence[Mapping[str, Estimate]]) -> Any:
    """What a knob trades: residency and locality, the wait of returns, the sessions' time; bands are 95 % intervals."""
    figure, axes_of = panels(len(SWEEP_PANELS))
    at = _positions(values)
    for axes, (title, label, names) in zip(axes_of, SWEEP_PANELS, strict=True):
        for name, colour in zip(names, SERIES, strict=False):
            _band(axes, at, [point[name] for point in points], colour, LABELS[name])
        axes.set(title=title, xlabel=f"{knob}, {unit}" if unit else knob, ylabel=label)
        axes.set_xticks(at, [value_text(value) for value in values])
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, columnspacing=1.2, handlelength=1.4)
        if label.endswith(", s"):
            axes.set_ylim(bottom=0)
    return figure


@styled
def heat_maps(
    knobs: tuple[str, str], rows: Sequence[Any], columns: Sequence[Any], means: Mapping[str, Sequence[Sequence[float | None]]]
) -> Any:
    """One map per metric of ``means`` (rows × columns) over two knobs; darker is better. An undefined cell stays empty."""
    figure, axes_of = panels(len(means), height_in=1.6 + 0.42 * max(len(rows), 4))
    for axes, (name, grid) in zip(axes_of, means.items(), strict=True):
        values = np.array([[np.nan if cell is None else cell for cell in line] for line in grid], dtype=float)
        map_name = "Blues" if METRICS[name].better == "higher" else "Blues_r"
        image = axes.imshow(values, cmap=map_name, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else INK
                axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=9)
        axes.set(title=name, xlabel=knobs[1], ylabel=knobs[0])
        axes.set_xticks(range(len(columns)), [value_text(value) for value in columns])
        axes.set_yticks(range(len(rows)), [value_text(value) for value in rows])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return figure


def _band(axes: Any, at: Sequence[float], estimates: Sequence[Estimate], colour: str, label: str) -> None:
    def values(attribute: str) -> Array:
        return np.array([np.nan if (value := getattr(entry, attribute)) is None else value for entry in estimates], dtype=float)

    axes.plot(at, values("mean"), "o-", color=colour, label=label, markersize=5)
    axes.fill_between(at, values("low"), values("high"), color=colour, alpha=0.16, linewidth=0)


def _positions(values: Sequence[Any]) -> list[float]:
    """Numbers stand where they belong; names, and numbers over more than two decades, stand side by side."""
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    positive = [value for value in values if numeric and value > 0]
    if not numeric or (positive and max(positive) > 100 * min(positive)):
        return [float(number) for number in range(len(values))]
    return [float(value) for value in values]
