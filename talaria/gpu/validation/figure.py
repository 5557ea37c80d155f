"""What a validation looks like: simulated against measured sessions and calls, and the terms of Eq. 1 against what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from talaria.gpu.validation.terms import TERMS
from talaria.report.style import INK, SERIES, panels, styled

if TYPE_CHECKING:
    from talaria.gpu.validation.compare import Validation


@styled
def draw(validation: Validation) -> Any:
    """Three panels: every session's SCT and every call's TTFT, simulated over measured, and mean terms, predicted and happened."""
    figure, (sessions, calls, terms) = panels(3, height_in=3.4)
    _against(sessions, validation.simulated.sct_s, validation.measured.sct_s, SERIES[0])
    ttfts_s = [{key: times.ttft_s for key, times in one.calls.items()} for one in (validation.simulated, validation.measured)]
    _against(calls, ttfts_s[0], ttfts_s[1], SERIES[1])
    sessions.set(title="Sessions: SCT, s", xlabel="measured", ylabel="simulated")
    calls.set(title="Calls: TTFT, s", xlabel="measured", ylabel="simulated")
    for shift, (label, colour) in enumerate((("predicted", SERIES[0]), ("happened", SERIES[1]))):
        means = [validation.document["terms"].get(name, {}).get(f"{label}_mean_s", 0.0) for name in TERMS]
        terms.bar(np.arange(len(TERMS)) + 0.38 * (shift - 0.5), means, 0.36, label=label, color=colour)
    terms.set_xticks(range(len(TERMS)), TERMS)
    terms.set(title="Eq. 1: mean seconds a call")
    terms.legend()
    return figure


def _against(axes: Any, simulated: dict[Any, float], measured: dict[Any, float], colour: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    keys = [key for key in measured if key in simulated]
    x, y = np.array([measured[key] for key in keys]), np.array([simulated[key] for key in keys])
    axes.scatter(x, y, s=9, color=colour, alpha=0.5, linewidths=0)
    if keys:
        low, high = max(min(x.min(), y.min()), 1e-3), max(x.max(), y.max(), 2e-3)
        axes.plot((low, high), (low, high), color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
