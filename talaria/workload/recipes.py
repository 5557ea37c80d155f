"""The laws that generated workloads follow, as numbers: one ``Recipe`` per preset (SPEC §7).

A recipe is plain data with bounds. Any field can be overridden by name from a scenario file or the command line;
what the numbers do is in ``generate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from talaria.errors import InputError, unknown_name
from talaria.validation import parse

Count = Annotated[int, Field(ge=1, le=10_000_000)]
Tokens = Annotated[int, Field(ge=0, le=10_000_000)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0.0, le=10.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

TP8_MODELS = ("Qwen3-235B", "GLM5-nvfp4", "Qwen3.5-122B-A10B")
TP4_MODELS = ("Qwen3-32B", "Qwen2.5-32B-Instruct", "Qwen3.5-35B-A3B")


class Recipe(BaseModel):
    """Laws of one generated workload. ``LN(median, sigma)`` is lognormal; the defaults are the ``corpus`` column of SPEC §7.

    Sessions are numbered issue by issue and go over the models in turn, so that with M models the sessions
    ``M·i … M·i + M - 1`` are issue i; with ``model_shares`` each session draws its model instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = ("model",)
    model_shares: tuple[Positive, ...] = ()
    """Relative popularity of each model; empty: every issue runs once on every model."""
    sessions: Count = 445

    depth_median: Positive = 11.0
    depth_sigma: Sigma = 0.908
    depth_cap: Count = 187
    calls_per_model: Count | None = None
    """Depths are rescaled, after the cap, so that each model gets exactly this many calls."""

    shared_tokens: Tokens = 11_500
    """Leading tokens (system prompt and tools) that all first prompts and all rewritten prompts have in common."""
    first_median_tokens: Positive = 1500.0
    """First prompt: shared + LN."""
    first_sigma: Sigma = 0.70
    output_median_tokens: Positive = 145.0
    output_sigma: Sigma = 1.0
    output_cap_tokens: Count = 8192
    append_median_tokens: Positive = 562.6
    """Tool result before each continuation: m·LN, with one m = LN(1, append_session_sigma) per session."""
    append_sigma: Sigma = 1.25
    append_session_sigma: Sigma = 1.219
    append_floor_tokens: Tokens = 5
    append_cap_tokens: Count = 25_000

    break_probability: Share = 0.0519
    """Per continuation: the prompt no longer continues the previous one beyond the shared tokens."""
    rewrite_share: Share = 0.74
    """Of the breaks: same length, new content after the shared tokens. The others are compactions."""
    compact_median_tokens: Positive = 6000.0
    """Compaction: the prompt shrinks to shared + LN."""
    compact_sigma: Sigma = 0.5
    context_limit_tokens: Count = 160_000
    """A prompt that would grow beyond it is compacted."""

    gap_median_s: Positive = 0.383
    gap_sigma: Sigma = 0.653
    short_gap_cap_s: Positive = 10.0
    long_gap_share: Share = 0.0215
    """Share of gaps that are Pareto above ``long_gap_floor_s`` instead."""
    long_gap_floor_s: Positive = 10.0
    long_gap_alpha: Positive = 1.2
    long_gap_cap_s: Positive = 600.0


REPLAY = Recipe(models=TP8_MODELS, sessions=30, depth_median=29.0, depth_sigma=0.45, depth_cap=100, calls_per_model=320)

PRESETS: dict[str, Recipe] = {
    # Of the published 6,294 gaps 5 exceed 30 s: a tail beyond 10 s as light as that, and no other preset rests on it.
    "corpus": Recipe(long_gap_alpha=3.0),
    "replay960": REPLAY,
    "replay960_swe": REPLAY.model_copy(
        update={
            "shared_tokens": 14_500,
            "first_median_tokens": 1000.0,
            "output_sigma": 0.95,
            "append_median_tokens": 300.0,
            "append_session_sigma": 0.38,
            "break_probability": 0.0,
            "context_limit_tokens": 1_000_000,
        }
    ),
    # Small enough to run in a blink, with every mechanism at work.
    "quickstart": REPLAY.model_copy(update={"sessions": 12, "depth_median": 10.0, "calls_per_model": 40}),
    # 10 issues on three models with 4 calls each: the rates published for it are multiples of 1/90 (FIDELITY).
    "placement": Recipe(models=TP4_MODELS, sessions=30, depth_median=4.0, depth_sigma=0.0),
    # 24 sessions of 5 calls (multiples of 1/96); its gaps must be longer than the corpus's to explain its lease hits.
    "tau_sweep": Recipe(
        models=TP4_MODELS,
        sessions=24,
        depth_median=5.0,
        depth_sigma=0.0,
        gap_median_s=5.6,
        gap_sigma=2.2,
        short_gap_cap_s=600.0,
        long_gap_share=0.0,
    ),
    "mixed": Recipe(models=tuple(f"model-{i}" for i in range(5)), sessions=100),
}


def resolve(name: str, overrides: Mapping[str, Any], *, where: str = "") -> Recipe:
    """The recipe of preset ``name`` with fields replaced.

    Raises InputError that names the preset or field, the value and what is allowed.
    """
    if name not in PRESETS:
        raise unknown_name("workload preset", name, PRESETS, where=where)
    where = where or f"workload preset {name!r}"
    for field in overrides:
        if field not in Recipe.model_fields:
            raise unknown_name("setting", field, Recipe.model_fields, where=where)
    made = parse(Recipe, {**PRESETS[name].model_dump(), **overrides}, where)
    _check_together(made, where)
    return made


def _check_together(made: Recipe, where: str) -> None:
    """Constraints between fields; raises InputError."""
    models = len(made.models)

    def reject(what: str, allowed: str) -> None:
        raise InputError(what, where=where, allowed=allowed)

    if len(set(made.models)) < models:
        reject(f"models = {list(made.models)!r}", "each model once")
    if made.model_shares and len(made.model_shares) != models:
        reject(f"model_shares has {len(made.model_shares)} values", f"one per model ({models})")
    if made.append_floor_tokens > made.append_cap_tokens:
        reject(f"append_floor_tokens = {made.append_floor_tokens}", f"at most append_cap_tokens ({made.append_cap_tokens})")
    if made.shared_tokens >= made.context_limit_tokens:
        reject(f"shared_tokens = {made.shared_tokens}", f"less than context_limit_tokens ({made.context_limit_tokens})")
    if made.calls_per_model is not None and (made.model_shares or made.sessions % models or made.calls_per_model * models < made.sessions):
        reject(
            f"calls_per_model = {made.calls_per_model} with {made.sessions} sessions over {models} models",
            "no model_shares, a whole number of sessions per model and at least one call per session",
        )
