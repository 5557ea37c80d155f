"""Draws how well fitted curves meet their points: fitted against measured time above, relative errors below."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from talaria.errors import InputError
from talaria.profiles.fit import CurveFit, ModelFit


def draw_fits(fits: dict[str, ModelFit], path: Path) -> bytes:
    """The figure as the content of a file at ``path``, in the format of its suffix. Raises InputError if that is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    suffix = path.suffix.removeprefix(".")
    if suffix not in formats:
        raise InputError(f"cannot draw {path.suffix or 'a file without suffix'!r}", where=str(path), allowed=", ".join(sorted(formats)))
    axes = figure.subplots(2, 2, sharex="col")
    _draw_curve(axes[0][0], axes[1][0], "prefill", {name: fit.prefill for name, fit in fits.items()})
    _draw_curve(axes[0][1], axes[1][1], "decode step", {name: fit.decode for name, fit in fits.items()})
    axes[0][0].legend(fontsize="small")
    content = BytesIO()
    figure.savefig(content, format=suffix, dpi=120)
    return content.getvalue()


def _draw_curve(times: Any, errors: Any, title: str, fits: dict[str, CurveFit]) -> None:
    """One column: times above, errors below."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    times.set(title=title, xscale="log", yscale="log", ylabel="fitted, ms")
    errors.set(xlabel="measured, ms", ylabel="relative error, %")
    for name, fit in fits.items():
        measured_ms = fit.measured_s * 1e3
        times.plot(measured_ms, measured_ms * (1 + fit.errors), ".", label=name)
        errors.plot(measured_ms, fit.errors * 100, ".", label=name)
    span_ms = [end(end(fit.measured_s) for fit in fits.values()) * 1e3 for end in (min, max)]
    times.plot(span_ms, span_ms, color="black", linewidth=0.8)
    errors.axhline(0, color="black", linewidth=0.8)
    for axis in (times.xaxis, times.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
