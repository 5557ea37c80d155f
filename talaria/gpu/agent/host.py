"""Around an agent's instance: the engines that carry out what it decides, and whom it tells what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from talaria.gpu.engine.switch import SwitchTimes
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.protocol.agent import CallEnded, Switched
from talaria.gpu.protocol.engine import Hello, ToEngine
from talaria.policy.calls import LineKey
from talaria.policy.instance import Command, EngineView, Event, RoundSummary
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import Residency


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the group, in bytes over all its ranks, as far as the profile knows; else 0."""

    weight_bytes: Mapping[str, int]
    hbm_capacity_bytes: int = 0
    host_weight_bytes: int = 0


class HostKv(NamedTuple):
    """Over all ranks and models, in bytes; counters since the agent's start."""

    used: int = 0
    capacity: int = 0
    restored: int = 0
    evicted_pages: int = 0
    failed_copies: int = 0


class Staged(NamedTuple):
    """Of the active model's KV, over all ranks, in bytes: what holds weights of the next one, and what has room for more (SPEC §5.3)."""

    target: str = ""
    """Empty: nothing is staged."""
    coverage: float = 0.0
    """Share of its weights, on the rank that has least."""
    weight_bytes: int = 0
    clean_bytes: int = 0
    dirty_bytes: int = 0
    """Staged once and overwritten by KV since."""
    slack_bytes: int = 0
    bytes_per_s: float = 0.0
    """At which a rank has copied so far; 0: nothing yet."""


class Engines(Protocol):
    """The engines of one group, one per model, of which at most one is active."""

    def residency(self, model: str) -> Residency: ...

    def alive(self, model: str) -> bool:
        """Whether it takes requests, active or parked."""

    def limits(self, model: str) -> Hello:
        """What an engine that is alive said of itself."""

    def refusal(self, model: str) -> str | None:
        """Why calls for the model had better not wait: its engine does not start."""

    def cached_tokens(self, model: str, prompt: PageChain) -> int:
        """Tokens of the prompt that the device holds now."""

    def kv_version(self, model: str) -> int:
        """Changes with every change of what the device holds."""

    def restorable_tokens(self, model: str, prompt: PageChain, from_tokens: int) -> int:
        """Where a prefix ends that the device has up to ``from_tokens`` and the host continues."""

    def host_version(self) -> int:
        """Changes with every change of what the host holds."""

    def host_kv(self) -> HostKv:
        """How full the host's pool is, and what has come of it."""

    def forget_host_kv(self) -> None:
        """Empty the host's pool, while no engine copies anything."""

    def send(self, model: str, message: ToEngine) -> None: ...

    def stage(self, model: str, share: float) -> None:
        """The active engine brings the weights of ``model`` to its device beside what it does, at a share of the rate that is allowed."""

    def unstage(self) -> None:
        """And lets go of them."""

    def staged(self) -> Staged:
        """How far that is. A switch ends it."""

    def kill(self, model: str, why: str) -> None:
        """It does not answer any more; its death is then reported like any other."""

    async def switch(self, source: str | None, target: str) -> SwitchTimes:
        """Park one and activate the other, by a start if it is absent. Raises EngineFailed; then ``residency`` tells of both."""

    async def close(self, model: str) -> None: ...

    async def reap(self, model: str) -> None:
        """An engine has died: wait until it may be started again."""

    async def flush(self, model: str) -> None:
        """Empty the prefix cache of the active one. Raises EngineFailed."""


class Host(Protocol):
    """Whom the instance tells what happened."""

    def call_ended(self, ended: CallEnded, key: LineKey) -> None:
        """The last word on a call. Whoever grants leases answers a completed one with ``lease_changed``, even if there is none."""

    def round_closed(self, summary: RoundSummary) -> None: ...

    def switched(self, switch: Switched) -> None: ...

    def phase(self, name: str, model: str, started_s: float, ended_s: float) -> None: ...

    def stepped(self, event: Event, view: EngineView, now_s: float, commands: list[Command]) -> None:
        """Before the commands are carried out."""

    def tuned(self, knobs: Knobs, now_s: float) -> None:
        """The scheduler decides by other knobs from the next step on."""

    def slot_opened(self) -> None:
        """A moment at which routers want to know."""

    def health_changed(self) -> None: ...
