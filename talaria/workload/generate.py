"""Sessions drawn from a recipe, one at a time: the workloads that every scenario runs without a trace file (SPEC §7).

A session is a function of (recipe, seed, its number) alone. It can be drawn in any order and any process, and two
configurations under one seed see the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from talaria.workload.recipes import Recipe, resolve
from talaria.workload.session import Session, TraceCall
from talaria.workload.streams import stream

LINE = "main"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def preset(name: str, seed: int, **overrides: Any) -> GeneratedWorkload:
    """The workload ``name`` (a key of ``PRESETS``) drawn under ``seed`` (>= 0), recipe fields replaced by ``overrides``.

    Raises InputError for an unknown preset or field and for a value out of bounds.
    """
    return GeneratedWorkload(name, resolve(name, overrides), seed)


class GeneratedWorkload:
    """A lazy ``Workload``: nothing but the depth and the model of each session is kept (6 bytes a session)."""

    block_tokens = 0
    block_scope = "session"

    def __init__(self, name: str, recipe: Recipe, seed: int) -> None:
        self.name, self.recipe, self.seed = name, recipe, seed
        self._model_of = _models_of_sessions(recipe, seed).astype(np.uint16)
        self._depths = _depths(recipe, seed, self._model_of).astype(np.uint32)

    def models(self) -> tuple[str, ...]:
        calls = np.bincount(self._model_of, weights=self._depths, minlength=len(self.recipe.models))
        ranked = sorted((-count, model) for count, model in zip(calls, self.recipe.models, strict=True) if count)
        return tuple(model for _, model in ranked)

    def sessions(self) -> Iterator[Session]:
        issue_size = 1 if self.recipe.model_shares else len(self.recipe.models)
        for number in range(self.recipe.sessions):
            model = int(self._model_of[number])
            rng = stream(self.seed, f"session/{number}")
            calls = _draw_calls(self.recipe, self.recipe.models[model], int(self._depths[number]), rng)
            yield Session(f"i{number // issue_size:04d}-m{model}", calls, shared_tokens=self.recipe.shared_tokens)


def _lognormal(median: float, sigma: float, normal: Floats) -> Floats:
    return median * np.exp(sigma * normal)


def _whole(values: Floats, low: int, high: int) -> list[int]:
    whole: list[int] = np.clip(np.rint(values), low, high).astype(np.int64).tolist()
    return whole


def _models_of_sessions(law: Recipe, seed: int) -> Ints:
    """The index of each session's model."""
    if not law.model_shares:
        return np.arange(law.sessions, dtype=np.int64) % len(law.models)
    edges = np.cumsum(law.model_shares) / sum(law.model_shares)
    drawn = np.searchsorted(edges, stream(seed, "models").random(law.sessions), side="right")
    return np.asarray(np.minimum(drawn, len(law.models) - 1), np.int64)


def _depths(law: Recipe, seed: int, model_of: npt.NDArray[np.uint16]) -> Ints:
    """Calls of each session. Session i's draw does not depend on how many sessions follow it."""
    real = np.minimum(_lognormal(law.depth_median, law.depth_sigma, stream(seed, "depths").standard_normal(law.sessions)), law.depth_cap)
    if law.calls_per_model is None:
        return np.asarray(_whole(real, 1, law.depth_cap))
    depths = np.empty(law.sessions, np.int64)
    for model in range(len(law.models)):
        depths[model_of == model] = _apportion(real[model_of == model], law.calls_per_model)
    return depths


def _apportion(weights: Floats, total: int) -> Ints:
    """``total`` split in proportion to ``weights`` by largest remainder, at least 1 each. Needs total >= len(weights)."""
    exact = weights * (total / weights.sum())
    parts: Ints = np.maximum(np.floor(exact), 1).astype(np.int64)
    missing = total - int(parts.sum())
    if missing > 0:
        parts[np.argsort(parts - exact, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        parts[np.argmax(parts)] -= 1
    return parts


def _draw_gaps(law: Recipe, normal: Floats, is_long: Floats, tail: Floats) -> list[float]:
    """Seconds, to the millisecond, from one normal and two uniforms per call."""
    short = np.minimum(_lognormal(law.gap_median_s, law.gap_sigma, normal), law.short_gap_cap_s)
    long = np.minimum(law.long_gap_floor_s * (1.0 - tail) ** (-1.0 / law.long_gap_alpha), law.long_gap_cap_s)
    gaps: list[float] = np.round(np.where(is_long < law.long_gap_share, long, short), 3).tolist()
    return gaps


def _draw_calls(law: Recipe, model: str, depth: int, rng: np.random.Generator) -> tuple[TraceCall, ...]:
    """One session's calls. The number of draws depends on ``depth`` only, so that overriding one law leaves the others' draws."""
    first, scale = rng.standard_normal(2).tolist()
    output, append, gap, compact = rng.standard_normal((4, depth))
    breaks, rewrites, is_long, tail = rng.random((4, depth))
    outputs = _whole(_lognormal(law.output_median_tokens, law.output_sigma, output), 1, law.output_cap_tokens)
    append_median = law.append_median_tokens * math.exp(law.append_session_sigma * scale)
    appends = _whole(_lognormal(append_median, law.append_sigma, append), law.append_floor_tokens, law.append_cap_tokens)
    compacted = _whole(law.shared_tokens + _lognormal(law.compact_median_tokens, law.compact_sigma, compact), 1, law.context_limit_tokens)
    broken = (breaks < law.break_probability).tolist()
    kept_length = (rewrites < law.rewrite_share).tolist()
    gaps = _draw_gaps(law, gap, is_long, tail)

    prompt = max(1, law.shared_tokens + round(law.first_median_tokens * math.exp(law.first_sigma * first)))
    calls = [TraceCall(LINE, model, 0, prompt, outputs[0])]
    for turn in range(1, depth):
        previous = turn - 1
        reusable = prompt + outputs[previous]
        prompt = reusable + appends[turn]
        too_long = prompt > law.context_limit_tokens
        if broken[turn] or too_long:
            if too_long or not kept_length[turn]:
                prompt = compacted[turn]
            reusable = min(law.shared_tokens, reusable, prompt)
        calls.append(TraceCall(LINE, model, turn, prompt, outputs[turn], gaps[turn], (previous,), None, previous, reusable))
    return tuple(calls)
