"""Short ways to write down a quantity with its provenance."""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]
GIB = 1024**3


def published(value: float, source: str) -> Table:
    return {"value": value, "provenance": "published", "source": source}


def fitted(value: float, source: str) -> Table:
    return {"value": value, "provenance": "fitted", "source": source}


def assumed(value: float, source: str) -> Table:
    return {"value": value, "provenance": "assumed", "source": source}


OUTPUT_PRIOR = assumed(239.0, "mean of the completion-length law of SPEC §7: lognormal, median 145, sigma 1")
PAGE_TOKENS = assumed(64, "a page size that SGLang's attention backends for these models accept")
CHUNK_BYTES = assumed(64 * 1024**2, "milliseconds of the staging link, so that a chunk in flight blocks few rows for long")
RESTORE_BASE = assumed(0.002, "one lookup, one slot allocation and one launch per layer")
CHECKPOINT_TOKENS = assumed(1024, "a knob (SPEC §5.2): state is then about as large as the KV of its span")
WEIGHTS_32B = published(16_400_000_000, "32.8 B parameters in BF16 over four ranks")
WEIGHTS_35B = published(17_500_000_000, "35 B parameters in BF16 over four ranks")
WINDOW_QWEN3_235B = assumed(262_144, "native window of the 2507 release; the first release reaches 131,072 with YaRN")
WINDOW_GLM5 = published(202_752, "max_position_embeddings of zai-org/GLM-5-FP8")
WINDOW_QWEN35 = published(262_144, "max_position_embeddings of the Qwen3.5 models")
WINDOW_32B = published(131_072, "model cards of Qwen3-32B and Qwen2.5-32B-Instruct, with YaRN")
NOISE = {
    "prefill_cv": assumed(0.05, "spread of repeated prefills of one length on a quiet GPU"),
    "decode_cv": assumed(0.03, "spread of repeated decode steps on a quiet GPU"),
}
PAPER = "arXiv 2607.17181v1"
_COMPONENT = f"{PAPER}, switch component run, full D2D, per-rank p50"
PHASES = {
    "save_phase_s": published(0.0262, f"{_COMPONENT}, p1"),
    "shell_phase_s": published(0.0005, f"{_COMPONENT}, p3"),
    "backend_phase_s": published(0.0086, f"{_COMPONENT}, p4"),
    "publish_phase_s": published(0.0002, f"{_COMPONENT}, p5"),
}


def open_from_storage(weight_bytes: float) -> Table:
    """The cost of a full open whose weights are not in host memory yet."""
    seconds = round(20 + weight_bytes / 2e9, 1)
    return assumed(seconds, "weights from local NVMe at 2 GB/s a rank, and 20 s for post-processing and graph capture")
