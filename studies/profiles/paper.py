"""The two testbeds of the published system as profiles: published points, the values that a prototype's calibration
found, and assumptions where both are silent. Each number says which of the three it is.
"""

from __future__ import annotations

from typing import Any

PAPER = "arXiv 2607.17181v1"
GIB = 1024**3

Table = dict[str, Any]


def published(value: float, source: str) -> Table:
    return {"value": value, "provenance": "published", "source": source}


def fitted(value: float, source: str) -> Table:
    return {"value": value, "provenance": "fitted", "source": source}


def assumed(value: float, source: str) -> Table:
    return {"value": value, "provenance": "assumed", "source": source}


CALIBRATION = "calibration of a prototype on the published TP=8 replay"
OUTPUT_PRIOR = assumed(239.0, "mean of the completion-length law of SPEC §7: lognormal, median 145, sigma 1")
PAGE_TOKENS = assumed(64, "a page size that SGLang's attention backends for these models accept")
RESTORE_BASE = assumed(0.002, "one lookup, one slot allocation and one launch per layer")


def hardware(tp: int, *, residue_gib: float, host_weight_bytes: int, host_kv_bytes: int) -> Table:
    """Hardware of one published instance: ``tp`` GPUs of 183 GiB."""
    component = f"{PAPER}, switch component run, full D2D, per-rank p50"
    return {
        "tp": published(tp, f"{PAPER}: tensor-parallel degree of the testbed"),
        "hbm_bytes": published(183 * GIB, f"{PAPER}: 183 GiB a GPU"),
        "device_cap_bytes": published(round(177.1 * GIB), f"{PAPER}: peak footprint 177.1 of 183 GiB"),
        "bump_fraction": published(0.8, f"{PAPER}: mem-fraction-bump"),
        "runtime_bytes": assumed(8 * GIB, "activations of a 16K-token prefill chunk and attention workspaces"),
        "residue_bytes": fitted(
            round(residue_gib * GIB), "the published peak of 177.1 GiB less the managed buffer, over the opened models"
        ),
        "host_weight_bytes": assumed(host_weight_bytes, "images of the testbed's models, with a tenth to spare"),
        "host_kv_bytes": assumed(host_kv_bytes, "what 2 TB of host memory leave beside the weight images and the system, shared"),
        "h2d_bytes_per_s": fitted(33e9, f"{CALIBRATION} (H2D-only switches)"),
        "d2d_bytes_per_s": fitted(664e9, f"{CALIBRATION}: a full D2D switch to the median model takes 0.106 s with the phases below"),
        "d2h_bytes_per_s": assumed(33e9, "as H2D: the link is symmetric"),
        "staging_bytes_per_s": fitted(10.4e9, CALIBRATION),
        "restore_bytes_per_s": fitted(5.8e9, CALIBRATION),
        "contention_factor": fitted(1.25, CALIBRATION),
        "restore_base_s": RESTORE_BASE,
        "save_phase_s": published(0.0262, f"{component}, p1"),
        "shell_phase_s": published(0.0005, f"{component}, p3"),
        "backend_phase_s": published(0.0086, f"{component}, p4"),
        "publish_phase_s": published(0.0002, f"{component}, p5"),
        "page_tokens": PAGE_TOKENS,
        "chunk_bytes": assumed(64 * 1024**2, "tens of milliseconds of work for the staging link at most"),
        "prefill_cv": assumed(0.05, "spread of repeated prefills of one length on a quiet GPU"),
        "decode_cv": assumed(0.03, "spread of repeated decode steps on a quiet GPU"),
        "switch_cv": fitted(0.08, f"{PAPER}: H2D-only switches, p95 over p50, beyond the spread of model sizes"),
        "rank_spread_cv": assumed(0.03, "the slowest of eight ranks then takes 4 % more than their mean"),
    }


def curves(prefill: tuple[float, float, float], prefill_source: str, decode: tuple[Table, Table, Table]) -> Table:
    """The coefficients of one model: prefill assumed from a like model, decode as given."""
    base, slope, slope2 = (assumed(value, prefill_source) for value in prefill)
    return {
        "prefill_base_s": base,
        "prefill_s_per_token": slope,
        "prefill_s_per_token2": slope2,
        "decode_base_s": decode[0],
        "decode_s_per_sequence": decode[1],
        "decode_s_per_context_token": decode[2],
    }


def recompute(source: str, provenance: str) -> Table:
    """The published cost of a lost prefix, 4.3 s at 25K and 10.9 s at 100K tokens, as a base and a slope."""
    slope = (10.9 - 4.3) / 75_000
    values = {"recompute_base_s": 4.3 - 25_000 * slope, "recompute_s_per_token": slope}
    return {name: {"value": round(value, 9), "provenance": provenance, "source": source} for name, value in values.items()}


TP8_DECODE = (
    fitted(0.005, CALIBRATION),
    fitted(0.00038, CALIBRATION),
    fitted(0.0, f"{CALIBRATION}: its decode step had no context term"),
)
RECOMPUTE_235B = f"{PAPER}: TTFT medians of Qwen3-235B at TP=8, 4.3 s at 25K and 10.9 s at 100K tokens; the implied base is unexplained"


def tp8(like: dict[str, tuple[float, float, float]]) -> Table:
    """``paper-tp8``. ``like`` gives prefill coefficients (base, per token, per token²) of the B200 profile's models."""
    hybrid = tuple(value * 10 / 3 * 4 / 8 for value in like["Qwen3.5-35B-A3B"])
    models = {
        "Qwen3-235B": {
            "family": "mha",
            "layers": published(94, "Qwen3-235B-A22B configuration"),
            "weight_bytes": fitted(58_750_000_000, f"{CALIBRATION}; it is the BF16 checkpoint over eight ranks"),
            "kv_bytes_per_token": published(48_128, "Qwen3-235B-A22B configuration: 94 layers, one KV head of 128 a rank, K and V, BF16"),
            "context_limit_tokens": published(262_144, "Qwen3-235B-A22B-2507 configuration"),
            "open_s": assumed(49.0, "weights from local NVMe at 2 GB/s a rank, and 20 s for post-processing and graph capture"),
            **curves(like["Qwen3-235B-fp8"], "B200 profile, Qwen3-235B-fp8; BF16 is likely slower", TP8_DECODE),
            **recompute(RECOMPUTE_235B, "fitted"),
        },
        "GLM5-nvfp4": {
            "family": "mla",
            "layers": published(78, "GLM-5 configuration"),
            "weight_bytes": fitted(46_800_000_000, f"{CALIBRATION}; it is the NVFP4 checkpoint over eight ranks"),
            "kv_bytes_per_token": published(60_216, "aiconfigurator-core 0.12.0, GLM-5-NVFP4 at TP=8: latent and indexer rows"),
            "context_limit_tokens": published(202_752, "GLM-5 configuration"),
            "open_s": assumed(43.0, "as Qwen3-235B"),
            **curves(like["GLM-5-nvfp4"], "B200 profile, GLM-5-nvfp4", TP8_DECODE),
            **recompute("as Qwen3-235B: nothing is published for this model", "assumed"),
        },
        "Qwen3.5-122B-A10B": {
            "family": "recurrent",
            "layers": published(48, "Qwen3.5-122B-A10B configuration"),
            "weight_bytes": fitted(30_500_000_000, f"{CALIBRATION}; it is the BF16 checkpoint over eight ranks"),
            "kv_bytes_per_token": published(
                12_288, "Qwen3.5-122B-A10B configuration: 12 attention layers, a KV head of 256, K and V, BF16"
            ),
            "context_limit_tokens": published(262_144, "Qwen3.5-122B-A10B configuration"),
            "open_s": assumed(35.0, "as Qwen3-235B"),
            "state_bytes": assumed(
                36 * (8 * 128 * 128 * 4 + 1536 * 3 * 2),
                "36 gated delta layers, 8 value heads of 128x128 a rank in FP32, and 3 steps of 1,536 BF16 convolution channels",
            ),
            "checkpoint_tokens": assumed(1024, "a knob (SPEC §5.2): state about as large as the KV of its span"),
            **curves(hybrid, "B200 profile, Qwen3.5-35B-A3B at TP=4, times 10/3 for active parameters, halved for TP=8", TP8_DECODE),
            **recompute("as Qwen3-235B: nothing is published for this model", "assumed"),
        },
    }
    return {
        "schema": "talaria.profile/1",
        "name": "paper-tp8",
        "description": "The published TP=8 server: eight 183 GiB GPUs as one instance, three models time-shared.",
        "gpu": "B200-class, 183 GiB",
        "hardware": hardware(8, residue_gib=(177.1 - 0.8 * 183) / 3, host_weight_bytes=1_200_000_000_000, host_kv_bytes=800_000_000_000),
        "models": _finished(models, 8),
    }


def tp4(like: dict[str, tuple[float, float, float]], decode: dict[str, tuple[float, float, float]]) -> Table:
    """``paper-tp4``. ``like`` and ``decode`` give the B200 profile's coefficients of Qwen3-32B and Qwen3.5-35B-A3B."""
    opening = (
        "opening one of these takes seconds here: 0.5 s of H2D from a warm host image and about 1.1 s of set-up; "
        "with prefill that stays below the published return TTFT p95 of 2.11 s at tau = 0"
    )
    dense_decode = tuple(assumed(value, "B200 profile, Qwen3-32B at TP=4") for value in decode["Qwen3-32B"])
    hybrid_decode = tuple(assumed(value, "B200 profile, Qwen3.5-35B-A3B at TP=4") for value in decode["Qwen3.5-35B-A3B"])
    models = {
        "Qwen3-32B": {
            "family": "mha",
            "layers": published(64, "Qwen3-32B configuration"),
            "weight_bytes": published(16_400_000_000, "32.8 B parameters in BF16 over four ranks"),
            "kv_bytes_per_token": published(65_536, "Qwen3-32B configuration: 64 layers, two KV heads of 128 a rank, K and V, BF16"),
            "context_limit_tokens": published(131_072, "Qwen3-32B model card, with YaRN"),
            "open_s": assumed(1.6, opening),
            **curves(like["Qwen3-32B"], "B200 profile, Qwen3-32B at TP=4", dense_decode),
        },
        "Qwen2.5-32B-Instruct": {
            "family": "mha",
            "layers": published(64, "Qwen2.5-32B-Instruct configuration"),
            "weight_bytes": published(16_400_000_000, "32.8 B parameters in BF16 over four ranks"),
            "kv_bytes_per_token": published(65_536, "Qwen2.5-32B configuration: 64 layers, two KV heads of 128 a rank, K and V, BF16"),
            "context_limit_tokens": published(131_072, "Qwen2.5-32B-Instruct model card, with YaRN"),
            "open_s": assumed(1.6, opening),
            **curves(like["Qwen3-32B"], "as Qwen3-32B, which has the same shape", dense_decode),
        },
        "Qwen3.5-35B-A3B": {
            "family": "recurrent",
            "layers": published(40, "Qwen3.5-35B-A3B configuration"),
            "weight_bytes": published(17_500_000_000, "35 B parameters in BF16 over four ranks"),
            "kv_bytes_per_token": published(10_240, "Qwen3.5-35B-A3B configuration: 10 attention layers, a KV head of 256, K and V, BF16"),
            "context_limit_tokens": published(262_144, "Qwen3.5-35B-A3B configuration"),
            "open_s": assumed(1.6, opening),
            "state_bytes": published(16_097_280, "aiconfigurator-core 0.12.0, Qwen3.5-35B-A3B: its per-token field less a token's 10,240"),
            "checkpoint_tokens": assumed(1024, "a knob (SPEC §5.2): state about as large as the KV of its span"),
            **curves(like["Qwen3.5-35B-A3B"], "B200 profile, Qwen3.5-35B-A3B at TP=4", hybrid_decode),
        },
    }
    return {
        "schema": "talaria.profile/1",
        "name": "paper-tp4",
        "description": "One worker of the published TP=4 placement testbed: four GPUs that hold one model at a time.",
        "gpu": "B200-class, 183 GiB",
        "hardware": hardware(4, residue_gib=(177.1 - 0.8 * 183) / 3, host_weight_bytes=250_000_000_000, host_kv_bytes=400_000_000_000),
        "models": _finished(models, 4),
    }


def _finished(models: dict[str, Table], tp: int) -> dict[str, Table]:
    shared = {"tp": published(tp, f"{PAPER}: tensor-parallel degree of the testbed"), "output_tokens_prior": OUTPUT_PRIOR}
    return {name: {**model, **shared} for name, model in models.items()}
