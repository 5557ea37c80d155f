"""B200 and H200: what a fit needs beside its points, and the models that a system has no points for."""

from __future__ import annotations

import numpy as np

from studies.profiles.quantities import (
    CHECKPOINT_TOKENS,
    CHUNK_BYTES,
    GIB,
    NOISE,
    OUTPUT_PRIOR,
    PAGE_TOKENS,
    PHASES,
    RESTORE_BASE,
    WEIGHTS_32B,
    WEIGHTS_35B,
    WINDOW_32B,
    WINDOW_GLM5,
    WINDOW_QWEN3_235B,
    WINDOW_QWEN35,
    Table,
    assumed,
    open_from_storage,
    published,
)
from talaria.profiles.fit import DECODE, PREFILL, ModelFit, fit_model, fit_summaries, fitted_quantities
from talaria.profiles.points import Entries, Entry, ModelPoints

HUB_IDS = {
    "Qwen3-235B-fp8": "Qwen/Qwen3-235B-A22B-FP8",
    "Qwen3-235B-nvfp4": "nvidia/Qwen3-235B-A22B-NVFP4",
    "GLM-5-nvfp4": "nvidia/GLM-5-NVFP4",
    "GLM-5.2-fp8": "zai-org/GLM-5.2-FP8",
    "Qwen3.5-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
}
HYBRID = "Qwen3.5-35B-A3B"
RELIABLE_CONTEXT = 32_768
UNRELIABLE = "the source says that they look extrapolated; they grow with the context of one sequence whatever the batch"
LIKE = {"GLM-5.2-fp8": "Qwen3-235B-fp8", "Qwen3.5-35B-A3B": "Qwen3-32B"}
"""Models without H200 points → the model with the same layout whose B200-to-H200 ratio stands in."""


def hardware(gpu_bytes: int, memory_bytes_per_s: float, host_weights: float, host_kv: float) -> Table:
    """A server of eight such GPUs with PCIe 5.0 x16 each."""
    return {
        "tp": published(8, "eight GPUs a server; a model measured at a lower degree leaves the others idle"),
        "hbm_bytes": published(gpu_bytes, "aiconfigurator-core 0.12.0, total_gpu_capacity_bytes"),
        "device_cap_bytes": assumed(gpu_bytes - 4 * GIB, "4 GiB for driver, communicators and fragmentation"),
        "bump_fraction": assumed(0.8, "as the published system"),
        "runtime_bytes": assumed(8 * GIB, "activations of a 16K-token prefill chunk and attention workspaces"),
        "residue_bytes": assumed(4 * GIB, "CUDA context 1.6 GB, NCCL 1 GB, graphs: inferred, to be measured on the machine"),
        "host_weight_bytes": assumed(int(host_weights), "images of all models of this profile"),
        "host_kv_bytes": assumed(int(host_kv), "a part of what the server has beside weight images"),
        "h2d_bytes_per_s": assumed(50e9, "PCIe 5.0 x16 with pinned memory, all ranks at once"),
        "d2d_bytes_per_s": assumed(
            memory_bytes_per_s / 4, f"a quarter of {memory_bytes_per_s / 1e12:g} TB/s: each byte read and written, in chunks"
        ),
        "d2h_bytes_per_s": assumed(50e9, "as H2D"),
        "staging_bytes_per_s": assumed(16e9, "the published testbed's ratio of staging to H2D, 10.4 : 33"),
        "restore_bytes_per_s": assumed(9e9, "the published testbed's ratio of restore to H2D, 5.8 : 33"),
        "contention_factor": assumed(1.25, "as the published testbed"),
        "restore_base_s": RESTORE_BASE,
        **PHASES,
        "page_tokens": PAGE_TOKENS,
        "chunk_bytes": CHUNK_BYTES,
        **NOISE,
        "switch_cv": assumed(0.08, "as the published testbed"),
        "rank_spread_cv": assumed(0.03, "as the published testbed"),
    }


def model(name: str) -> Table:
    """Sizes of one model at the degree that its points were taken with, which are the same on both systems."""
    family, tp, layers, weights, kv_bytes, kv_from, window = SIZES[name]
    sizes = {
        "hub_id": HUB_IDS[name],
        "family": family,
        "tp": published(tp, "aiconfigurator-core 0.12.0, tp of the entry"),
        "layers": published(layers, f"configuration of {HUB_IDS[name]}"),
        "weight_bytes": weights,
        "kv_bytes_per_token": published(kv_bytes, kv_from),
        "context_limit_tokens": window,
        "output_tokens_prior": OUTPUT_PRIOR,
        "open_s": open_from_storage(weights["value"]),
    }
    if family == "recurrent":
        sizes["state_bytes"] = published(
            16_107_520 - 10_240, "aiconfigurator-core 0.12.0: its kv_size_per_token_bytes, which is state and one token of KV"
        )
        sizes["checkpoint_tokens"] = CHECKPOINT_TOKENS
    return sizes


_NATIVE = "aiconfigurator-core 0.12.0, kv_size_per_token_bytes"
_DIVIDED = (
    "aiconfigurator-core 0.12.0, total_kv_size_bytes over total_kv_size_tokens, as its note asks: 10 layers, one KV head of 256, BF16"
)
_FP8_235B = assumed(29_600_000_000, "235 B parameters in FP8, embeddings in BF16, over eight ranks")
_NVFP4_235B = assumed(16_800_000_000, "the FP8 checkpoint less the KV capacity that aiconfigurator-core 0.12.0 gains with NVFP4")
_FP8_GLM5 = assumed(93_500_000_000, "744 B parameters in FP8, embeddings in BF16, over eight ranks")
_NVFP4_GLM5 = assumed(50_800_000_000, "the FP8 checkpoint less the KV capacity that aiconfigurator-core 0.12.0 gains with NVFP4")
SIZES = {
    "Qwen3-235B-fp8": ("mha", 8, 94, _FP8_235B, 24_064, _NATIVE, WINDOW_QWEN3_235B),
    "Qwen3-235B-nvfp4": ("mha", 8, 94, _NVFP4_235B, 24_064, _NATIVE, WINDOW_QWEN3_235B),
    "GLM-5-nvfp4": ("mla", 8, 78, _NVFP4_GLM5, 60_216, _NATIVE, WINDOW_GLM5),
    "GLM-5.2-fp8": ("mla", 8, 78, _FP8_GLM5, 60_216, _NATIVE, WINDOW_GLM5),
    "Qwen3.5-35B-A3B": ("recurrent", 4, 40, WEIGHTS_35B, 10_240, _DIVIDED, WINDOW_QWEN35),
    "Qwen3-32B": ("mha", 4, 64, WEIGHTS_32B, 65_536, _NATIVE, WINDOW_32B),
}


def fits_of(document: Entries, system: str) -> dict[str, ModelFit]:
    """Both curves of every model that ``document`` has points for on ``system``."""
    by_hub_id = {entry.model: entry for entry in document.entries if entry.system == system}
    return {name: _fit(name, by_hub_id[hub_id]) for name, hub_id in HUB_IDS.items() if hub_id in by_hub_id}


def _fit(name: str, entry: Entry) -> ModelFit:
    limit = RELIABLE_CONTEXT if name == HYBRID else None
    points = ModelPoints(prefill=entry.prefill, decode=entry.decode, reliable_context=limit, note=UNRELIABLE)
    return fit_model(points, name)


def b200(document: Entries) -> Table:
    fits = fits_of(document, "b200_sxm")
    return {
        "schema": "talaria.profile/1",
        "name": "b200",
        "description": "An eight-GPU B200 server, fitted from kernel-based estimates of SGLang; two models run on four of its ranks.",
        "gpu": "B200 SXM, 180 GiB",
        "hardware": hardware(193_273_528_320, 8e12, 1.8e12, 1.0e12),
        "models": {name: {**model(name), **fitted_quantities(fit, document.source)} for name, fit in fits.items()},
        "fits": {name: fit_summaries(fit) for name, fit in fits.items()},
    }


def h200(document: Entries) -> Table:
    """Models without points get their B200 curves, slowed as the like model with points is slowed."""
    fits, before = fits_of(document, "h200_sxm"), fits_of(document, "b200_sxm")
    models = {name: {**model(name), **fitted_quantities(fit, document.source)} for name, fit in fits.items()}
    for name, like in LIKE.items():
        models[name] = {**model(name), **_slowed(before[name], before[like], fits[like], like)}
    return {
        "schema": "talaria.profile/1",
        "name": "h200",
        "description": "An eight-GPU H200 server, fitted from kernel-based estimates of SGLang; two models are carried over from b200.",
        "gpu": "H200 SXM, 141 GiB",
        "hardware": hardware(151_397_597_184, 4.8e12, 1.3e12, 0.6e12),
        "models": models,
        "fits": {name: fit_summaries(fit) for name, fit in fits.items()},
    }


def _slowed(fit: ModelFit, like_before: ModelFit, like_after: ModelFit, like: str) -> Table:
    """Coefficients of a model without points: times the median ratio, point by point, of the like model on both systems."""
    coefficients = {}
    for names, curve in ((PREFILL, "prefill"), (DECODE, "decode")):
        before, after = getattr(like_before, curve), getattr(like_after, curve)
        ratio = float(np.median(after.measured_s / before.measured_s))
        source = f"b200's fit times {ratio:.2f}, the median ratio of H200 to B200 {curve} times of {like}: no H200 points of this model"
        for field in names:
            coefficients[field] = assumed(float(f"{getattr(fit, curve).coefficients[field] * ratio:.4g}"), source)
    return coefficients
