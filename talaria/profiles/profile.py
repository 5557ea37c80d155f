"""A loaded profile: plain numbers, the latency shape that follows from them, and what lies outside its evidence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel

from talaria.errors import unknown_name
from talaria.policy.timing import Timing
from talaria.profiles.numbers import HardwareNumbers, ModelNumbers
from talaria.profiles.schema import ProfileFile, Quantity


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of instance and the models it can run. ``file`` keeps provenance and fits; ``hash`` identifies it all."""

    name: str
    gpu: str
    hardware: HardwareNumbers
    models: dict[str, ModelNumbers]
    hash: str
    """First 12 hexadecimal digits of the SHA-256 of the canonical JSON document."""
    file: ProfileFile

    def model(self, name: str) -> ModelNumbers:
        """Raises InputError with the nearest name if the profile has no such model."""
        if name not in self.models:
            raise unknown_name("model", name, self.models, where=f"profile {self.name}")
        return self.models[name]

    def timing(self, model: str) -> Timing:
        """The latency shape of ``model`` on this hardware, all in seconds (SPEC §3.3, §5.4).

        A switch is its fixed phases plus the weights over the bandwidth of its path. Recurrent state is resumed at its
        checkpoints only, so their spacing is that model's unit of reuse. Raises InputError for an unknown model.
        """
        numbers, hardware = self.model(model), self.hardware
        return Timing(
            prefill_base_s=numbers.prefill_base_s,
            prefill_s_per_token=numbers.prefill_s_per_token,
            prefill_s_per_token2=numbers.prefill_s_per_token2,
            decode_base_s=numbers.decode_base_s,
            decode_s_per_sequence=numbers.decode_s_per_sequence,
            decode_s_per_context_token=numbers.decode_s_per_context_token,
            restore_base_s=hardware.restore_base_s + numbers.state_bytes / hardware.restore_bytes_per_s,
            restore_s_per_token=numbers.kv_bytes_per_token / hardware.restore_bytes_per_s,
            swap_s_per_token=numbers.kv_bytes_per_token / hardware.d2h_bytes_per_s,
            d2d_switch_s=sum(hardware.phases_s(staged=True)) + numbers.weight_bytes / hardware.d2d_bytes_per_s,
            h2d_switch_s=sum(hardware.phases_s(staged=False)) + numbers.weight_bytes / hardware.h2d_bytes_per_s,
            open_s=numbers.open_s,
            recompute_base_s=numbers.recompute_base_s,
            recompute_s_per_token=numbers.recompute_s_per_token,
            page_tokens=max(hardware.page_tokens, numbers.checkpoint_tokens),
        )

    def beyond_evidence(self, model: str, *, prompt_tokens: int, batch: int) -> tuple[str, ...]:
        """One phrase for each way in which prompts or batches up to this size leave the range of the fitted points.

        Says nothing about a curve that was not fitted to points: its range is unknown. Raises InputError for an unknown model.
        """
        self.model(model)
        uses = {"tokens": prompt_tokens, "context": prompt_tokens, "batch": batch}
        return tuple(
            f"{model} {curve} to {axis} {uses[axis]:,} (points end at {high:,.0f})"
            for curve, summary in self.file.fits.get(model, {}).items()
            for axis, (_, high) in summary.ranges.items()
            if axis in uses and uses[axis] > high
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """To worker processes a profile travels as its document: the classes behind ``file`` are made at run time."""
        return _from_document, (self.file.document(),)


def resolve(file: ProfileFile) -> Profile:
    """The profile that a validated file describes."""
    canonical = json.dumps(file.document(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return Profile(
        name=file.name,
        gpu=file.gpu,
        hardware=HardwareNumbers(**_plain(file.hardware, HardwareNumbers)),
        models={name: ModelNumbers(**_plain(model, ModelNumbers)) for name, model in file.models.items()},
        hash=hashlib.sha256(canonical.encode()).hexdigest()[:12],
        file=file,
    )


def _from_document(document: dict[str, Any]) -> Profile:
    return resolve(ProfileFile.model_validate(document))


def _plain(quantities: BaseModel, numbers: type) -> dict[str, Any]:
    values = {field.name: getattr(quantities, field.name) for field in fields(numbers)}
    return {name: value.value if isinstance(value, Quantity) else value for name, value in values.items() if value is not None}
