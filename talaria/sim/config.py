"""Configurations: which router places calls, and which mechanisms the instances have. Compared under one workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from talaria.errors import unknown_name


@dataclass(frozen=True, slots=True)
class Config:
    """One system to compare. ``knobs`` are overrides by command-line name that belong to the system itself."""

    name: str
    description: str
    router: str = "full"
    session_prefill: bool = True
    hkvr: bool = True
    staging: bool = True
    knobs: Mapping[str, object] = field(default_factory=dict)


_ALL = (
    Config("talaria", "leases, residency cost and replica gate; session-prefill, host KV registry and staged switching"),
    Config("no-sp", "talaria without session-prefill: returns wait for their model's next slot", session_prefill=False),
    Config("no-hkvr", "talaria without the host KV registry: a switch loses every idle prefix", hkvr=False),
    Config("h2d-only", "talaria without staging: every switch reloads its weights from host memory", staging=False),
    Config(
        "round-only", "rounds alone: no session-prefill, no host KV registry, no staging", session_prefill=False, hkvr=False, staging=False
    ),
    Config("full", "the full router on talaria's instances (the same as talaria)"),
    Config("least-pressure", "places each call on the least loaded instance, blind to model and KV", router="least-pressure"),
    Config("session-sticky", "keeps a session on its first instance, the least loaded one when it began", router="session-sticky"),
    Config("round-robin", "deals calls out in turn", router="round-robin"),
    Config("aegaeon", "groups calls of a model, models take turns; returns wait for their slot", router="aegaeon", session_prefill=False),
    Config("serverlessllm", "where the model is estimated to start first", router="serverlessllm", session_prefill=False),
    Config("preble", "longest cached prefix against load", router="preble", session_prefill=False),
    Config("mooncake", "least estimated time to first token, stored KV included", router="mooncake", session_prefill=False),
    Config("continuum", "keeps KV for a computed time to live, within which a return joins its slot", router="continuum"),
    Config(
        "sglang-cache-aware", "prefix match above a threshold, else least loaded", router="sglang-cache-aware", session_prefill=False
    ),
)

CONFIGS: dict[str, Config] = {config.name: config for config in _ALL}


def get(name: object, *, where: str = "--config") -> Config:
    """The configuration called ``name``; ``where`` is the option or file that named it. Raises InputError with the nearest name."""
    if not isinstance(name, str) or name not in CONFIGS:
        raise unknown_name("config", str(name), CONFIGS, where=where)
    return CONFIGS[name]
