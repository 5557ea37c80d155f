"""The TP=8 testbed: the published replay of 30 sessions under five configurations, and its switches."""

from __future__ import annotations

import math
from itertools import pairwise

from studies.calibrate.draft import Draft
from studies.calibrate.parameters import Place, arrivals, component, hardware, knob, parameter, workload
from studies.calibrate.testbed import Order, Testbed, published
from talaria.profiles import load as load_profile
from talaria.reproduce.checks import RISING
from talaria.reproduce.experiments import REPLAY, Experiment

PREFILL = ("prefill_base_s", "prefill_s_per_token", "prefill_s_per_token2")
DECODE = ("decode_base_s", "decode_s_per_context_token")
LIKE = {"Qwen3-235B": ("Qwen3-235B-fp8", 1.0), "GLM5-nvfp4": ("GLM-5-nvfp4", 1.0), "Qwen3.5-122B-A10B": ("Qwen3.5-35B-A3B", 10 / 3 / 2)}
"""Model → whose curve of profile b200 it has, and times what: ten third of the active parameters, on twice the ranks."""
OUTPUT_SIGMA = 0.95
QWEN3, GLM5 = "Qwen3-235B", "GLM5-nvfp4"
RECOMPUTED = {25_000: 4.3, 100_000: 10.9}
"""Published TTFT medians of a lost prefix, tokens → seconds."""


def _prefill(draft: Draft, factor: float) -> None:
    """Prefill of new tokens: what kernels alone would take, times ``factor``."""
    b200 = load_profile("b200").models
    for name, (like, times) in LIKE.items():
        for field in PREFILL:
            value = getattr(b200[like], field) * times * factor
            draft.set_quantity(draft.profile["models"][name], field, value, f"profile b200, {like}, times {times * factor:.3g}")


def _outputs(draft: Draft, median: float) -> None:
    """The law's median, and its mean as what policies expect."""
    draft.scenarios[REPLAY]["workload"]["output_median_tokens"] = median
    for model in draft.profile["models"].values():
        draft.set_quantity(model, "output_tokens_prior", float(round(median * math.exp(OUTPUT_SIGMA**2 / 2))))


def _decode(*names: str) -> Place:
    """Decode steps of one sequence: what kernels alone would take, a base and a part that grows with the context, times the value."""

    def put(draft: Draft, factor: float) -> None:
        b200 = load_profile("b200").models
        for name in names:
            like, times = LIKE[name]
            for field in DECODE:
                value = getattr(b200[like], field) * times * factor
                draft.set_quantity(draft.profile["models"][name], field, value, f"profile b200, {like}, times {times * factor:.3g}")

    return put


def _recompute(draft: Draft, base_s: float) -> None:
    """The base of the one lost-prefix curve that is published; what its two points say of it then. Others' is their prefill."""
    tables = draft.profile["models"]
    draft.set_quantity(tables[QWEN3], "recompute_base_s", base_s)
    curve = {name: tables[QWEN3][f"recompute_{name}"]["value"] for name in ("base_s", "s_per_token")}
    errors = {tokens: abs((curve["base_s"] + curve["s_per_token"] * tokens) / seconds - 1) for tokens, seconds in RECOMPUTED.items()}
    low, high = sorted(errors.values())
    worst = max(errors, key=lambda tokens: errors[tokens])
    draft.profile["fits"][QWEN3]["recompute"].update(
        median_error=round((low + high) / 2, 4), max_error=round(high, 4), worst=f"tokens {worst:,}"
    )  # fmt: skip


PARAMETERS = (
    parameter(
        "issue_spacing",
        "s",
        (100, 157, 200),
        "ten issues start well within the published walls of 1,632 and 1,753 s",
        arrivals("staggered:{:g}:3"),
    ),
    parameter("depth_sigma", "", (0.45, 0.57, 0.908), "the recipe's to the regime's", workload("depth_sigma")),
    parameter("output_median", "tokens", (50, 63.5, 160), "agent traces: up to 150; only its product with T_TPOT shows", _outputs),
    parameter(
        "append_median",
        "tokens",
        (150, 235, 450),
        "agent traces: tool results of some hundred tokens; the recipe says 300",
        workload("append_median_tokens"),
    ),
    parameter("t_tpot", "s", (0.05, 0.178, 0.25), "open; 4 to 20 tokens a second", knob("t_tpot"), log=True),
    parameter("gamma", "", (0.7, 0.968, 1.0), "the source asks for less than 1; published rounds last 8.2 and 8.8 of 10 s", knob("gamma")),
    parameter(
        "decode_factor",
        "",
        (0.4, 0.5, 1.25),
        "near the kernels alone, less with speculation; only its product with the outputs shows",
        _decode(*(name for name in LIKE if name != GLM5)),
        log=True,
    ),
    parameter(
        "glm5_decode_factor",
        "",
        (0.5, 2.0, 2.5),
        "a new architecture on an engine that is young for it: up to twice the kernels alone",
        _decode(GLM5),
        log=True,
    ),
    parameter(
        "prefill_factor", "", (0.6, 0.7, 4.0), "near the kernels alone, up to the published slope of recomputing", _prefill, log=True
    ),
    parameter(
        "recompute_base",
        "s",
        (0.0, 0.05, 2.1),
        "published TTFT medians imply 2.1 s, which may include waiting",
        _recompute,
    ),
    parameter("interference", "", (1.0, 1.42, 1.5), "staging beside serving", hardware("staging_interference")),
    parameter("h2d", "B/s", (20e9, 32.4e9, 50e9), "below PCIe 5's 55 GB/s", hardware("h2d_bytes_per_s"), log=True),
    parameter("d2d", "B/s", (200e9, 400e9, 3000e9), "below half of HBM's 8 TB/s", hardware("d2d_bytes_per_s"), log=True),
    parameter("staging", "B/s", (5e9, 10.9e9, 33e9), "chunks beside serving: up to the link", hardware("staging_bytes_per_s"), log=True),
    parameter("contention", "", (1.0, 1.16, 2.0), "two streams on one link", hardware("contention_factor")),
    parameter("restore", "B/s", (3e9, 4.1e9, 33e9), "scattered pages: at most the link", hardware("restore_bytes_per_s"), log=True),
    parameter("link_load", "", (1.0, 1.756, 2.5), "the stress run's host link, shared with what stresses it", component("link_load")),
    parameter("partial_stage", "s", (0.5, 2.9, 2.9), "less than all of most models", component("partial_stage_s")),
    parameter("switch_cv", "", (0.02, 0.1, 0.3), "spread of switches of one kind", hardware("switch_cv"), log=True),
)

_ERRORS = {"25000": 0.2, "100000": 0.2, "sct_p50_s": 0.15, "sct_p95_s": 0.2, "ttft_p50_s": 0.5, "ttft_p95_s": 0.2}
_WEIGHTS = {
    **{f"{phase}/p{percent}": 0.0 for phase in ("p1", "p3", "p4", "p5") for percent in (50, 95)},  # no parameter here moves them
    **{f"{column}/p{percent}": 4.0 if percent == 50 else 0.25 for column in ("p2", "total") for percent in (50, 95)},
    "sct_p50_s": 4.0,
    "sct_p95_s": 4.0,
    "talaria/ttft_p50_s": 0.5,
    "peak_hbm_gib": 0.0,
}


def _orders() -> tuple[Order, ...]:
    keys = [Experiment(REPLAY, config) for config in RISING]
    return (
        Order("sct_p50_s", keys[0], keys[1], 1.03),
        *(Order("sct_p50_s", low, high, 0.95) for low, high in pairwise(keys[1:])),
    )


TESTBED = Testbed(
    name="tp8",
    profile="paper-tp8",
    scenarios=(REPLAY,),
    parameters=PARAMETERS,
    fitted=published(("recompute", "tp8", "switch", "component"), _ERRORS, _WEIGHTS),
    orders=_orders(),
    search_seeds=range(0, 24),
    polish_seeds=range(0, 24),
)
