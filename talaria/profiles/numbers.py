"""The numbers of a hardware profile, as a simulator wants them: plain, typed, with units in their names.

These two dataclasses are the only list of a profile's fields. ``schema.py`` derives the file format from them, by wrapping
each number into a quantity that says where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

MOST = 2**60
"""Of anything that is counted: products of such numbers are still floats."""
LONGEST_S = 1e9
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]
Bytes = Annotated[int, Field(ge=1, le=MOST)]
BytesOrNone = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=1, le=MOST, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, le=MOST, allow_inf_nan=False)]
Variation = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Family = Literal["mha", "mla", "recurrent"]


@dataclass(frozen=True, slots=True)
class HardwareNumbers:
    """One tensor-parallel GPU group and its host. Bandwidths are per rank, in bytes per second (SPEC §5)."""

    tp: Annotated[int, Field(ge=1, le=1024)]
    """Ranks of the group, one GPU each."""
    hbm_bytes: Bytes
    """Memory of one GPU."""
    device_cap_bytes: Bytes
    """Footprint of one GPU that must never be exceeded."""
    bump_fraction: Share
    """Share of the HBM that the managed buffer takes: weights, KV and runtime buffers of the active model."""
    runtime_bytes: Bytes
    """High end of the managed buffer, per GPU: activations and workspaces of the active model."""
    residue_bytes: Bytes
    """What every opened model keeps on each GPU outside the managed buffer: CUDA context, graphs, communicators."""
    host_weight_bytes: Bytes
    """Host memory of the whole group for weight images."""
    host_kv_bytes: Bytes
    """Host memory of the whole group for the KV registry."""
    h2d_bytes_per_s: Rate
    """Weights of a switch from pinned host memory, nothing else on the link."""
    d2d_bytes_per_s: Rate
    """Gather of staged chunks into the weights region."""
    d2h_bytes_per_s: Rate
    """Checkpoints to the host, and the KV of an in-flight sequence that leaves the device at a switch."""
    staging_bytes_per_s: Rate
    """Weights of the next model into the KV tail, beside a serving model."""
    restore_bytes_per_s: Rate
    """KV blocks of one prefix from the host registry."""
    contention_factor: Factor
    """A switch's H2D is so many times slower while staging competes for the link."""
    restore_base_s: Seconds
    """Fixed cost of one restore: lookup, slot allocation, launch."""
    save_phase_s: Seconds
    """Switch phase 1: save and teardown."""
    shell_phase_s: Seconds
    """Switch phase 3: KV shell."""
    backend_phase_s: Seconds
    """Switch phase 4: attention backend and graphs."""
    publish_phase_s: Seconds
    """Switch phase 5: publish references."""
    page_tokens: Count
    chunk_bytes: Bytes
    """Unit of staging, per rank."""
    prefill_cv: Variation
    """Coefficient of variation of a prefill's duration around its curve; likewise below."""
    decode_cv: Variation
    switch_cv: Variation
    """Of what a switch reads from the host."""
    rank_spread_cv: Variation
    """Spread of one switch's duration between the ranks of a group."""
    staging_interference: Factor = 1.0
    """Prefill and decode are so many times slower while staging is at work beside them."""
    stager_phase_s: Seconds = 0.0
    """What phase 1 takes longer where a model is being staged: its copies are stopped, its map is saved."""
    unstaged_shell_s: Seconds = 0.0
    """What phase 3 takes longer where no model was staged: nothing has prepared the shell meanwhile."""
    gather_cv: Variation = 0.0
    """Of the gather of staged chunks, from switch to switch; of what the host sends it is ``switch_cv``."""
    save_phase_cv: Variation = 0.0
    """Of phase 1 around its median, from switch to switch; likewise below."""
    shell_phase_cv: Variation = 0.0
    backend_phase_cv: Variation = 0.0
    publish_phase_cv: Variation = 0.0
    call_overhead_s: Seconds = 0.0
    """What a call's way adds to its TTFT beside queue and prefill: through gateway and agent to its engine, and the first token's way
    back. All of it is charged on the way there."""

    @property
    def bump_bytes(self) -> int:
        """Size of the managed buffer of one GPU."""
        return int(self.hbm_bytes * self.bump_fraction)

    def phases_s(self, staged: bool) -> tuple[float, float, float, float]:
        """The fixed phases of a switch: 1, 3, 4 and 5 of SPEC §5.4; ``staged``: a model was being staged beside the one that served."""
        save_s, shell_s = self.save_phase_s, self.shell_phase_s
        if staged:
            save_s += self.stager_phase_s
        else:
            shell_s += self.unstaged_shell_s
        return save_s, shell_s, self.backend_phase_s, self.publish_phase_s


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """One model on one group. Sizes are per rank of the ``tp`` ranks it runs on; coefficients are ``Timing``'s."""

    hub_id: str
    """The weights' name on the Hugging Face hub."""
    family: Family
    """Of its reusable state: paired K/V, latent, or attention layers beside recurrent ones."""
    tp: Annotated[int, Field(ge=1, le=1024)]
    """Ranks the model runs on; fewer than the group's where the coefficients were taken so."""
    layers: Count
    weight_bytes: Bytes
    kv_bytes_per_token: Bytes
    context_limit_tokens: Count
    output_tokens_prior: Rate
    """Mean completion length that a router expects of calls that do not say theirs, before any was observed."""
    open_s: Seconds
    """absent → active: load, post-process, capture."""
    prefill_base_s: Seconds
    prefill_s_per_token: Seconds
    prefill_s_per_token2: Seconds
    decode_base_s: Seconds
    decode_s_per_sequence: Seconds
    decode_s_per_context_token: Seconds
    recompute_base_s: Seconds = 0.0
    """With the slope below: the curve of a lost prefix where it was published apart from prefill; zero otherwise."""
    recompute_s_per_token: Seconds = 0.0
    state_bytes: BytesOrNone = 0
    """Recurrent and convolution state of one sequence at one position; zero for pure attention."""
    checkpoint_tokens: CountOrNone = 0
    """Spacing of the positions at which recurrent state is kept; zero for pure attention."""

    @property
    def total_weight_bytes(self) -> int:
        """Weights of one replica over all its ranks."""
        return self.weight_bytes * self.tp
