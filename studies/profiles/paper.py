"""The two testbeds of the published system as profiles: published points, the values that a prototype's calibration
found, and assumptions where both are silent. Each number says which of the three it is.
"""

from __future__ import annotations

from studies.profiles.quantities import (
    CHECKPOINT_TOKENS,
    CHUNK_BYTES,
    GIB,
    NOISE,
    OUTPUT_PRIOR,
    PAGE_TOKENS,
    PAPER,
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
    fitted,
    open_from_storage,
    published,
)
from talaria.profiles.numbers import ModelNumbers

CALIBRATION = "calibration of a prototype on the published TP=8 replay"
RECOMPUTE = f"{PAPER}: TTFT medians of Qwen3-235B at TP=8, 4.3 s at 25K and 10.9 s at 100K tokens; the implied base is unexplained"
RECOMPUTE_FIT = {
    "points": 2,
    "median_error": 0.0,
    "max_error": 0.0,
    "worst": "none: two points, two coefficients",
    "ranges": {"tokens": (25_000, 100_000)},
}
OPENING = (
    "opening takes seconds here: 0.5 s of H2D from a warm host image and about 1.1 s of set-up; "
    "with prefill that stays below the published return TTFT p95 of 2.11 s at tau = 0"
)
PREFILL = ("prefill_base_s", "prefill_s_per_token", "prefill_s_per_token2")
DECODE = ("decode_base_s", "decode_s_per_sequence", "decode_s_per_context_token")

Models = dict[str, ModelNumbers]


_COMPONENTS = f"{PAPER}, switch component run, per rank"
SWITCH_TP8 = {
    "save_phase_s": published(0.0219, f"{_COMPONENTS}: p50 of p1, H2D only"),
    "stager_phase_s": fitted(0.0045, f"{_COMPONENTS}: p50 of p1, 26.2 and 26.9 ms with a staged model against 21.9 ms without"),
    "shell_phase_s": published(0.0005, f"{_COMPONENTS}: p50 of p3, full D2D and D2D with H2D"),
    "unstaged_shell_s": fitted(0.0003, f"{_COMPONENTS}: p50 of p3, 0.8 ms without a staged model against 0.5 ms with one"),
    "backend_phase_s": fitted(0.0083, f"{_COMPONENTS}: p50 of p4 over the three paths, 7.7 to 8.6 ms"),
    "publish_phase_s": published(0.0002, f"{_COMPONENTS}: p50 of p5"),
    "save_phase_cv": fitted(0.15, f"{_COMPONENTS}: p95 over p50 of p1, 1.15 to 1.45"),
    "shell_phase_cv": fitted(0.7, f"{_COMPONENTS}: p95 over p50 of p3, 2.4 to 4"),
    "backend_phase_cv": fitted(0.54, f"{_COMPONENTS}: p95 over p50 of p4, 2.1 to 2.4"),
    "publish_phase_cv": fitted(0.25, f"{_COMPONENTS}: p95 over p50 of p5, 1.5"),
    "gather_cv": fitted(0.4, f"{_COMPONENTS}: p95 over p50 of p2, full D2D, 2.2, beside the models' sizes"),
}
"""What the component run tells of the TP=8 server's switches; the bandwidths are a matter of ``studies/calibrate``."""


def hardware(tp: int, host_weight_bytes: float, host_kv_bytes: float) -> Table:
    """One published instance: ``tp`` GPUs of 183 GiB, three models opened in turn."""
    return {
        "tp": published(tp, f"{PAPER}: tensor-parallel degree of the testbed"),
        "hbm_bytes": published(183 * GIB, f"{PAPER}: 183 GiB a GPU"),
        "device_cap_bytes": published(round(177.1 * GIB), f"{PAPER}: peak footprint 177.1 of 183 GiB"),
        "bump_fraction": published(0.8, f"{PAPER}: mem-fraction-bump"),
        "runtime_bytes": assumed(8 * GIB, "activations of a 16K-token prefill chunk and attention workspaces"),
        "residue_bytes": fitted(
            int((177.1 - 0.8 * 183) / 3 * GIB), "the published peak of 177.1 GiB less the managed buffer, over three models"
        ),
        "host_weight_bytes": assumed(int(host_weight_bytes), "images of the three models, with a tenth to spare"),
        "host_kv_bytes": assumed(int(host_kv_bytes), "what 2 TB of host memory leave beside the weight images and the system, shared"),
        "h2d_bytes_per_s": fitted(33e9, f"{CALIBRATION} (H2D-only switches)"),
        "d2d_bytes_per_s": fitted(664e9, f"{CALIBRATION}: a full D2D switch to the median model takes 0.106 s with the phases below"),
        "d2h_bytes_per_s": assumed(33e9, "as H2D: the link is symmetric"),
        "staging_bytes_per_s": fitted(10.4e9, CALIBRATION),
        "restore_bytes_per_s": fitted(5.8e9, CALIBRATION),
        "contention_factor": fitted(1.25, CALIBRATION),
        "restore_base_s": RESTORE_BASE,
        **PHASES,
        "page_tokens": PAGE_TOKENS,
        "chunk_bytes": CHUNK_BYTES,
        **NOISE,
        "switch_cv": fitted(0.12, f"{PAPER}: p95 of H2D-only switches, 2,133 ms, over what the largest model takes on the slowest rank"),
        "rank_spread_cv": assumed(0.03, "the slowest of eight ranks then takes 4 % more than their mean"),
    }


def prefill(like: ModelNumbers, source: str, factor: float = 1.0) -> Table:
    """Prefill of new tokens, which is not published: that of a like model times ``factor``."""
    return {name: assumed(float(f"{getattr(like, name) * factor:.4g}"), source) for name in PREFILL}


def decode(like: ModelNumbers, source: str) -> Table:
    return {name: assumed(float(f"{getattr(like, name):.4g}"), source) for name in DECODE}


def recompute() -> Table:
    """The cost of a lost prefix as a base and a slope through the two published points, of the one model that has them."""
    slope = (10.9 - 4.3) / 75_000
    values = {"recompute_base_s": 4.3 - 25_000 * slope, "recompute_s_per_token": slope}
    return {name: {"value": round(value, 9), "provenance": "fitted", "source": RECOMPUTE} for name, value in values.items()}


def sizes(hub_id: str, tp: int, family: str, layers: int, weights: Table, kv: Table, window: Table) -> Table:
    return {
        "hub_id": hub_id,
        "family": family,
        "tp": published(tp, f"{PAPER}: tensor-parallel degree of the testbed"),
        "layers": published(layers, f"configuration of {hub_id}"),
        "weight_bytes": weights,
        "kv_bytes_per_token": kv,
        "context_limit_tokens": window,
        "output_tokens_prior": OUTPUT_PRIOR,
    }


def tp8(b200: Models) -> Table:
    """``paper-tp8``; prefill of new tokens comes from the B200 profile's models."""
    models = {"Qwen3-235B": _qwen3_235b(b200), "GLM5-nvfp4": _glm5(b200), "Qwen3.5-122B-A10B": _qwen35_122b(b200)}
    shared = {
        "decode_base_s": fitted(0.005, CALIBRATION),
        "decode_s_per_sequence": fitted(0.00038, CALIBRATION),
        "decode_s_per_context_token": fitted(0.0, f"{CALIBRATION}: its decode step had no context term"),
    }
    return {
        "schema": "talaria.profile/1",
        "name": "paper-tp8",
        "description": "The published TP=8 server: eight 183 GiB GPUs as one instance that time-shares three models.",
        "gpu": "B200-class, 183 GiB",
        "hardware": {**hardware(8, host_weight_bytes=1.2e12, host_kv_bytes=0.8e12), **SWITCH_TP8},
        "models": {
            name: {**model, **shared, "open_s": open_from_storage(model["weight_bytes"]["value"])} for name, model in models.items()
        },
        "fits": {"Qwen3-235B": {"recompute": RECOMPUTE_FIT}},
    }


def _qwen3_235b(b200: Models) -> Table:
    hub_id = "Qwen/Qwen3-235B-A22B"
    weights = fitted(58_750_000_000, f"{CALIBRATION}; it is the BF16 checkpoint over eight ranks")
    kv = published(48_128, f"configuration of {hub_id}: 94 layers, one KV head of 128 a rank, K and V, BF16")
    return {
        **sizes(hub_id, 8, "mha", 94, weights, kv, WINDOW_QWEN3_235B),
        **prefill(b200["Qwen3-235B-fp8"], "profile b200, Qwen3-235B-fp8; BF16 is likely slower"),
        **recompute(),
    }


def _glm5(b200: Models) -> Table:
    weights = fitted(46_800_000_000, f"{CALIBRATION}; near the NVFP4 checkpoint over eight ranks")
    kv = published(60_216, "aiconfigurator-core 0.12.0, nvidia/GLM-5-NVFP4 at TP=8: latent and indexer rows, on every rank")
    return {
        **sizes("nvidia/GLM-5-NVFP4", 8, "mla", 78, weights, kv, WINDOW_GLM5),
        **prefill(b200["GLM-5-nvfp4"], "profile b200, GLM-5-nvfp4"),
    }


def _qwen35_122b(b200: Models) -> Table:
    hub_id = "Qwen/Qwen3.5-122B-A10B"
    weights = fitted(30_500_000_000, f"{CALIBRATION}; it is the BF16 checkpoint over eight ranks")
    kv = assumed(12_288, f"from the sizes of {hub_id}: 12 attention layers, one KV head of 256 a rank, K and V, BF16")
    state = 36 * (8 * 128 * 128 * 4 + 1536 * 3 * 2)
    like = "profile b200, Qwen3.5-35B-A3B at TP=4, times 10/3 for the active parameters, halved for TP=8"
    return {
        **sizes(hub_id, 8, "recurrent", 48, weights, kv, WINDOW_QWEN35),
        "state_bytes": assumed(state, "36 gated delta layers: 8 value heads of 128x128 a rank in FP32, 3 steps of 1,536 BF16 channels"),
        "checkpoint_tokens": CHECKPOINT_TOKENS,
        **prefill(b200["Qwen3.5-35B-A3B"], like, 10 / 3 / 2),
    }


def tp4(b200: Models) -> Table:
    """``paper-tp4``; both curves come from the B200 profile's models, which have points at TP=4."""
    models = {
        "Qwen3-32B": _dense_32b("Qwen/Qwen3-32B", b200),
        "Qwen2.5-32B-Instruct": _dense_32b("Qwen/Qwen2.5-32B-Instruct", b200),
        "Qwen3.5-35B-A3B": _qwen35_35b(b200),
    }
    return {
        "schema": "talaria.profile/1",
        "name": "paper-tp4",
        "description": "One worker of the published TP=4 placement testbed: four GPUs that hold one model at a time.",
        "gpu": "B200-class, 183 GiB",
        "hardware": hardware(4, host_weight_bytes=0.25e12, host_kv_bytes=0.4e12),
        "models": {name: {**model, "open_s": assumed(1.6, OPENING)} for name, model in models.items()},
    }


def _dense_32b(hub_id: str, b200: Models) -> Table:
    """Both 32B models have one shape; only Qwen3-32B has points."""
    source = "profile b200, Qwen3-32B at TP=4"
    kv = published(65_536, f"configuration of {hub_id}: 64 layers, two KV heads of 128 a rank, K and V, BF16")
    like = b200["Qwen3-32B"]
    return {**sizes(hub_id, 4, "mha", 64, WEIGHTS_32B, kv, WINDOW_32B), **prefill(like, source), **decode(like, source)}


def _qwen35_35b(b200: Models) -> Table:
    source = "profile b200, Qwen3.5-35B-A3B at TP=4"
    like = b200["Qwen3.5-35B-A3B"]
    kv = assumed(like.kv_bytes_per_token, source)
    return {
        **sizes("Qwen/Qwen3.5-35B-A3B", 4, "recurrent", like.layers, WEIGHTS_35B, kv, WINDOW_QWEN35),
        "state_bytes": assumed(like.state_bytes, source),
        "checkpoint_tokens": CHECKPOINT_TOKENS,
        **prefill(like, source),
        **decode(like, source),
    }
