"""What an instance's policy starts from: knobs, the models' believed timing and their sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from talaria.errors import InputError
from talaria.gpu.agent.host import Sizes
from talaria.gpu.config import ClusterConfig, Instance, Policy
from talaria.policy.knobs import KnobError, Knobs, with_values
from talaria.policy.snapshot import Capabilities
from talaria.policy.timing import Timing
from talaria.profiles import load as load_profile
from talaria.yamlfile import read_mapping

UNPROFILED: Final = Timing(
    prefill_base_s=0.05, prefill_s_per_token=2e-4, prefill_s_per_token2=0.0, decode_base_s=0.02, decode_s_per_sequence=5e-4,
    decode_s_per_context_token=1e-8, restore_base_s=0.0, restore_s_per_token=0.0, swap_s_per_token=0.0, d2d_switch_s=1.0, h2d_switch_s=1.0,
    open_s=60.0,
)  # fmt: skip
"""Where the cluster names no profile: orders of magnitude, which the first rounds correct."""


def knobs_of(policy: Policy) -> Knobs:
    """Defaults, then the policy file's knobs, then the cluster's own. Raises InputError."""
    values: dict[str, object] = {}
    if policy.file is not None:
        saved = read_mapping(Path(policy.file), ("schema", "knobs")).get("knobs", {})
        if not isinstance(saved, dict):
            raise InputError(f"knobs is {saved!r:.60}", where=policy.file, allowed="a mapping of knob names to values")
        values |= saved
    values |= policy.knobs
    try:
        return with_values(Knobs(), {str(name): value for name, value in values.items()})
    except KnobError as error:
        raise InputError(f"{error.name}={error.value}", where="policy", allowed=error.allowed) from None


def capabilities_of(config: ClusterConfig, instance: Instance) -> Capabilities:
    """What an instance can do. Without a host pool, KV does not outlive its model's slot; only in an arena it can be staged into."""
    hot = instance.pool == "hot"
    return Capabilities(
        hot=hot, session_prefill=config.policy.session_prefill, hkvr=instance.host_kv_bytes > 0,
        staging=instance.arena is not None and not hot, inflight_kv="recompute", max_running=instance.max_running,
        max_resident_models=instance.max_resident_models,
    )  # fmt: skip


def staging_rate(config: ClusterConfig, instance: Instance) -> float:
    """Bytes a second that a rank may copy beside what it serves; without limit where nobody says. Raises InputError."""
    if instance.arena is not None and instance.arena.staging_gib_s is not None:
        return instance.arena.staging_gib_s * 2**30
    if config.policy.profile is None or not instance.gpus:
        return math.inf
    return load_profile(config.policy.profile, where="policy.profile").hardware.staging_bytes_per_s


def timing_of(config: ClusterConfig, instance: Instance) -> tuple[dict[str, Timing], Sizes]:
    """Beliefs and sizes of the instance's models, from the cluster's profile. Raises InputError."""
    if config.policy.profile is None:
        return dict.fromkeys(instance.models, UNPROFILED), Sizes(dict.fromkeys(instance.models, 0))
    profile = load_profile(config.policy.profile, where="policy.profile")
    named = {name: config.models[name].profile_model or name for name in instance.models}
    weights = {name: profile.model(model).total_weight_bytes for name, model in named.items()}
    hardware = profile.hardware
    sizes = Sizes(weights, hardware.device_cap_bytes * hardware.tp, sum(weights.values()))
    return {name: profile.timing(model) for name, model in named.items()}, sizes
