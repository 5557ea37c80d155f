"""Fits the latency shape of ``policy/timing.py`` to measured points: least squares of the relative errors, bounded below by zero.

The shape is linear in its coefficients, so the optimum is unique and found exactly; what the shape cannot follow stays
visible as residuals, which the fitted profile carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from talaria.errors import InputError
from talaria.profiles.load import load
from talaria.profiles.points import DecodePoint, ModelPoints, PointsFile, PrefillPoint
from talaria.profiles.schema import FitSummary, ProfileFile
from talaria.validation import parse

Array = NDArray[np.float64]
PREFILL = ("prefill_base_s", "prefill_s_per_token", "prefill_s_per_token2")
DECODE = ("decode_base_s", "decode_s_per_sequence", "decode_s_per_context_token")


@dataclass(frozen=True, slots=True)
class CurveFit:
    """One fitted curve. Arrays are parallel, one element per point."""

    coefficients: dict[str, float]
    """Field of ``ModelNumbers`` → value, six significant digits."""
    coordinates: dict[str, Array]
    """Axis (``tokens`` and ``cached``, or ``batch`` and ``context``) → where each point lies."""
    measured_s: Array
    errors: Array
    """Relative: fitted over measured, less one."""

    def summary(self, left_out: str = "") -> FitSummary:
        sizes = np.abs(self.errors)
        worst = int(np.argmax(sizes))
        return FitSummary(
            points=len(sizes),
            median_error=round(float(np.median(sizes)), 4),
            max_error=round(float(sizes[worst]), 4),
            worst=", ".join(f"{axis} {values[worst]:,.0f}" for axis, values in self.coordinates.items()),
            ranges={axis: (float(values.min()), float(values.max())) for axis, values in self.coordinates.items()},
            left_out=left_out,
        )

    def report(self) -> dict[str, Any]:
        """Coefficients, and every point with its measured time in seconds and its relative error, as plain JSON values."""
        columns = {axis: values.tolist() for axis, values in self.coordinates.items()}
        columns |= {"measured_s": self.measured_s.tolist(), "error": np.round(self.errors, 6).tolist()}
        points = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return {"coefficients": self.coefficients, "points": points}


def fit_prefill(points: Sequence[PrefillPoint]) -> CurveFit:
    """base + slope · new + slope2 · new · (cached + new/2). Raises InputError if the points do not determine it."""
    tokens = np.array([point.tokens for point in points], float)
    cached = np.array([point.cached for point in points], float)
    new = tokens - cached
    columns = (np.ones_like(new), new, new * (cached + new / 2))
    return _fit(PREFILL, columns, {"tokens": tokens, "cached": cached}, points)


def fit_decode(points: Sequence[DecodePoint]) -> CurveFit:
    """base + per sequence · batch + per context token · batch · context. Raises InputError likewise."""
    batch = np.array([point.batch for point in points], float)
    context = np.array([point.context for point in points], float)
    columns = (np.ones_like(batch), batch, batch * context)
    return _fit(DECODE, columns, {"batch": batch, "context": context}, points)


def _fit(
    names: tuple[str, ...], columns: tuple[Array, ...], coordinates: dict[str, Array], points: Iterable[PrefillPoint | DecodePoint]
) -> CurveFit:
    from scipy.optimize import lsq_linear

    measured_s = np.array([point.ms for point in points]) / 1e3
    relative = np.stack(columns, axis=1) / measured_s[:, None]
    scale = np.linalg.norm(relative, axis=0)
    if np.linalg.matrix_rank(relative / np.where(scale > 0, scale, 1)) < len(names):
        axes = " and ".join(coordinates)
        raise InputError(f"the points do not determine {', '.join(names)}", allowed=f"at least four points that vary in {axes}")
    solution = lsq_linear(relative / scale, np.ones_like(measured_s), bounds=(0, np.inf), method="bvls").x / scale
    rounded = np.array([float(f"{value:.6g}") for value in solution])
    return CurveFit(dict(zip(names, rounded.tolist(), strict=True)), coordinates, measured_s, relative @ rounded - 1)


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Both curves of one model, and what is said about the points that were left out."""

    prefill: CurveFit
    decode: CurveFit
    left_out: str = ""


def fit_model(points: ModelPoints, where: str) -> ModelFit:
    """Both curves of one model; ``where`` names it in errors."""
    limit = points.reliable_context
    kept = [point for point in points.decode if limit is None or point.context <= limit]
    dropped = len(points.decode) - len(kept)
    left_out = f"{dropped} decode points beyond a context of {limit:,} left out: {points.note}" if dropped else ""
    try:
        return ModelFit(fit_prefill(points.prefill), fit_decode(kept), left_out)
    except InputError as error:
        raise InputError(error.what, where=where, allowed=error.allowed, fix=error.fix) from None


def fit_profile(points: PointsFile, *, where: str) -> tuple[ProfileFile, dict[str, ModelFit]]:
    """The profile that ``points`` complete, and the fits by model.

    Quantities come from the file, then from its base profile; models of the base that have no points keep their
    coefficients. Raises InputError (``where`` is the points file) if a quantity is missing on both sides or the points do
    not determine a curve.
    """
    base: dict[str, Any] = load(points.base).file.document() if points.base else {"hardware": {}, "models": {}}
    fits = {name: fit_model(model, f"{where}: models.{name}") for name, model in points.models.items()}
    models = dict(base["models"])
    for name, fit in fits.items():
        models[name] = {**models.get(name, {}), **points.models[name].numbers, **fitted_quantities(fit, points.source)}
    summaries = {**base.get("fits", {}), **{name: fit_summaries(fit) for name, fit in fits.items()}}
    document = {
        "schema": "talaria.profile/1",
        "name": points.name,
        "description": points.description,
        "gpu": points.gpu or base.get("gpu"),
        "hardware": {**base["hardware"], **points.hardware},
        "models": models,
        "fits": summaries,
    }
    return parse(ProfileFile, document, where), fits


def fitted_quantities(fit: ModelFit, source: str) -> dict[str, Any]:
    """The six coefficients that a fit determines, as quantities whose source tells the points and the error that remains."""
    parts: dict[str, Any] = {}
    for curve, result in (("prefill", fit.prefill), ("decode", fit.decode)):
        summary = result.summary()
        text = (
            f"least squares over {summary.points} {curve} points of {source}; relative error "
            f"median {summary.median_error:.1%}, largest {summary.max_error:.1%} at {summary.worst}"
        )
        parts |= {name: {"value": value, "provenance": "fitted", "source": text} for name, value in result.coefficients.items()}
    return parts


def fit_summaries(fit: ModelFit) -> dict[str, Any]:
    """Both curves' summaries, as they stand in a profile file."""
    summaries = {"prefill": fit.prefill.summary(), "decode": fit.decode.summary(fit.left_out)}
    return {curve: summary.model_dump(mode="json") for curve, summary in summaries.items()}
