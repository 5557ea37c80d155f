"""How every figure looks: one palette, one set of sizes, readable at the width of a README column.

Figures are made without pyplot, so drawing one leaves no state behind, and their SVG is the same bytes every time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec

Parameters = ParamSpec("Parameters")

INK, MUTED, GRID = "#1d2733", "#5f6b7a", "#e3e7ec"
SERIES = ("#1f6fb4", "#e07b26", "#2c9a68", "#b5449b", "#7a5cc4", "#c33d3d", "#4aa6c4", "#8a7a2f")
"""Configurations and metrics, in the order in which they are given."""
ACTIVITIES = {
    "P": "#1f6fb4",
    "SP": "#4fb3d9",
    "decode": "#2c9a68",
    "linger": "#f0c04c",
    "switch": "#c33d3d",
    "other": "#b9c1cb",
}
PATH_COLOURS = {"d2d": "#2c9a68", "partial": "#f0c04c", "h2d": "#c33d3d"}
MEMORY_COLOURS = {"weights": "#1f6fb4", "KV": "#2c9a68", "staged": "#f0c04c"}

WIDTH_IN, HEIGHT_IN, DPI = 9.0, 3.5, 130

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.9,
    "savefig.facecolor": "white",
    "svg.hashsalt": "talaria",
    "svg.fonttype": "path",
}


def styled(draw: Callable[Parameters, Any]) -> Callable[Parameters, Any]:
    """Draw under the project's style without touching anybody else's matplotlib settings."""

    @wraps(draw)
    def drawn(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
        import matplotlib

        with matplotlib.rc_context(RC):
            return draw(*args, **kwargs)

    return drawn


def panels(columns: int = 1, *, height_in: float = HEIGHT_IN, widths: Iterable[float] | None = None) -> tuple[Any, list[Any]]:
    """An empty figure of the project's width and its axes, left to right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    ratios = list(widths) if widths is not None else None
    axes = figure.subplots(1, columns, squeeze=False, width_ratios=ratios)[0]
    return figure, list(axes)


def to_svg(figure: Any) -> str:
    """The figure as an ``<svg>`` element, without prologue, ready to stand in a page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def to_png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
