"""What the stub is told: SGLang's own command line, and its timing from the environment."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from talaria.gpu.protocol.engine import SOCKET_VARIABLE


@dataclass(slots=True)
class Timing:
    """``STUB_START_S`` before it listens, ``STUB_PREFILL_TOKEN_S`` for a token not cached, ``STUB_STEP_S`` between two tokens."""

    start_s: float = field(default_factory=lambda: float(os.environ.get("STUB_START_S", "0")))
    prefill_token_s: float = field(default_factory=lambda: float(os.environ.get("STUB_PREFILL_TOKEN_S", "0")))
    step_s: float = field(default_factory=lambda: float(os.environ.get("STUB_STEP_S", "0.005")))


@dataclass(frozen=True, slots=True)
class Options:
    path: str
    model: str
    host: str
    port: int
    page_tokens: int
    kv_tokens: int
    max_running: int
    context_tokens: int
    kv_events: dict[str, str]
    """Empty: none are published."""
    socket: str | None
    timing: Timing


def parse(arguments: Sequence[str]) -> Options:
    """Exits like the real engine where the model's path is wrong. Arguments that mean nothing here are passed over."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--max-total-tokens", type=int, default=1_000_000)
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--context-length", type=int, default=131_072)
    parser.add_argument("--kv-events-config", type=json.loads, default={})
    known, _ = parser.parse_known_args(arguments)
    if not (Path(known.model_path) / "config.json").is_file():
        raise SystemExit(f"OSError: {known.model_path} is not a local folder with a config.json")
    return Options(
        known.model_path, known.served_model_name or known.model_path, known.host, known.port, known.page_size, known.max_total_tokens,
        known.max_running_requests, known.context_length, known.kv_events_config, os.environ.get(SOCKET_VARIABLE), Timing(),
    )  # fmt: skip
