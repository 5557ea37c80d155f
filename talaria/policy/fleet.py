"""The newest snapshot of every instance, as numpy columns that are ready before a call arrives (SPEC §3.5).

Every latency in ``Timing`` is linear in a few features of a call, so one model on one instance is a column of
coefficients, and pricing a call everywhere is one product. Each column is a function of (snapshot, overlay); where either
has changed since, it is rewritten before anybody reads it: by ``refresh``, for that instance and model only.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from talaria.policy.knobs import Knobs
from talaria.policy.overlay import Load, Overlay
from talaria.policy.replicas import open_price_s
from talaria.policy.snapshot import ABSENT, ACTIVE, Capabilities, InstanceSnapshot, ModelSnapshot
from talaria.policy.timing import Timing

Vector = NDArray[np.float64]

FEATURES = 10
"""1; S; S·(U + S/2); U > 0; U; U²/2; decode steps; steps · context; decode steps in one round; round steps · context.
S: suffix, U: reusable prefix, in tokens."""
RISK_SHARE = 0.1
"""Each new deadline risk of an instance adds this share of the round bound to every wait predicted there, up to the whole
bound; what was added fades from snapshot to snapshot, by a factor of e per control window. It makes an instance less
attractive (Eq. 1) and a replica elsewhere more so (Eq. 2), but closes no gate: nobody is locked out by bad predictions.
"""


class ModelColumns:
    """One model on every instance.

    ``coefficients`` has two columns per instance i of n: i prices a call (Eq. 1), n + i its share of a round (Eq. 3).
    """

    def __init__(self, instances: int) -> None:
        self.timings: list[Timing | None] = [None] * instances
        self.coefficients: NDArray[np.float64] = np.zeros((FEATURES, 2 * instances))
        self.slot_at_s: Vector = np.zeros(instances)
        """When the model's next slot opens."""
        self.queued_s: Vector = np.zeros(instances)
        """Queued seconds before a new call: snapshot, overlay, leases, misprediction."""
        self.kv_room_tokens: Vector = np.full(instances, -1.0)
        """For a new call of the model; negative where the instance does not serve it."""
        self.open_price_s: Vector = np.full(instances, -inf)
        """Right side of Eq. 2; -inf where no replica need be opened."""
        self.closed: set[int] = set()
        """Instances where one would have to be opened; mostly empty, and then Eq. 2 need not be asked."""
        self.not_held: Vector = np.full(instances, inf)
        """0 where a healthy instance holds the model, inf elsewhere."""

    def drop(self, instance: int) -> None:
        """The instance no longer serves the model."""
        self.kv_room_tokens[instance] = -1.0
        self.not_held[instance] = inf
        self.closed.discard(instance)


class Fleet:
    """All instances in order. Snapshot times are on the router's clock; freshness goes by receive time."""

    def __init__(self, capabilities: Mapping[str, Capabilities], knobs: Knobs, nu_s: Mapping[str, float], overlay: Overlay) -> None:
        self.ids = tuple(capabilities)
        self.index = {name: i for i, name in enumerate(self.ids)}
        size = len(self.ids)
        self.snapshots: list[InstanceSnapshot | None] = [None] * size
        self.healthy = [False] * size
        self.fresh_until_s: Vector = np.full(size, -inf)
        self.round_room_s: Vector = np.full(size, -inf)
        """Seconds that the next round may still grow (Eq. 5); inf on idle and on hot instances."""
        self.pressure: Vector = np.zeros(size)
        """Calls there, queued, running or on their way, plus the next round's load as a share of the round bound."""
        self.round_bound_s = knobs.gamma * knobs.t_ttft_s
        self._hot = [item.hot for item in capabilities.values()]
        self.overlay = overlay
        self._knobs, self._nu_s = knobs, nu_s
        self.page_tokens: dict[str, int] = {}
        """Largest unit of prefix reuse of any instance, by model."""
        self._columns: dict[str, ModelColumns] = {}
        self._unwritten: dict[int, InstanceSnapshot] = {}
        """Instances whose snapshot or health is newer than their columns."""
        self._risk_s = [0.0] * size
        self._seen_calls = [0] * size

    def set_knobs(self, knobs: Knobs) -> None:
        """Every column is written anew, and what is fresh stays so for the new time from when it was received."""
        self.fresh_until_s += knobs.stale_after_s - self._knobs.stale_after_s
        self._knobs, self.round_bound_s = knobs, knobs.gamma * knobs.t_ttft_s
        self._risk_s = [min(self.round_bound_s, risk_s) for risk_s in self._risk_s]
        self._unwritten |= {i: snapshot for i, snapshot in enumerate(self.snapshots) if snapshot is not None}

    def columns(self, model: str) -> ModelColumns | None:
        """None for a model that no snapshot has named."""
        self.refresh()
        return self._columns.get(model)

    def observe(self, snapshot: InstanceSnapshot, now_s: float) -> None:
        """Take a snapshot received at ``now_s``, if its version is newer than the instance's last."""
        i = self.index[snapshot.instance]
        old = self.snapshots[i]
        if old is not None:
            if snapshot.version <= old.version:
                return
            for name in old.models:
                if name not in snapshot.models and name in self._columns:
                    self._columns[name].drop(i)
            if self._risk_s[i] or snapshot.deadline_risk != old.deadline_risk:
                faded = exp((old.time_s - snapshot.time_s) / self._knobs.control_window_s)
                risks = max(0, snapshot.deadline_risk - old.deadline_risk)
                self._risk_s[i] = min(self.round_bound_s, faded * self._risk_s[i] + RISK_SHARE * self.round_bound_s * risks)
        self.snapshots[i] = snapshot
        self.healthy[i] = snapshot.healthy
        self.fresh_until_s[i] = now_s + self._knobs.stale_after_s if snapshot.healthy else -inf
        seen_calls = 0
        for name, model in snapshot.models.items():
            seen_calls += model.queued + model.in_flight
            if model.timing.page_tokens > self.page_tokens.get(name, 0):
                self.page_tokens[name] = model.timing.page_tokens
        self._seen_calls[i] = seen_calls
        self._unwritten[i] = snapshot

    def seen_calls(self, instance: int) -> int:
        """Calls that the last snapshot saw there, queued or running, of all models."""
        return self._seen_calls[instance]

    def takes_new(self, columns: ModelColumns, now_s: float) -> NDArray[np.bool_]:
        """Instances that serve the model and may take new, non-reserved placements: healthy, telemetry fresh."""
        takes: NDArray[np.bool_] = (self.fresh_until_s >= now_s) & (columns.kv_room_tokens >= 0.0)
        return takes

    def heartbeat(self, instance: int, healthy: bool, now_s: float) -> None:
        """A missed heartbeat bars an instance until fresh telemetry; an answered one says that its last snapshot still holds."""
        if healthy == self.healthy[instance]:
            if self.fresh_until_s[instance] > -inf:
                self.fresh_until_s[instance] = now_s + self._knobs.stale_after_s
            return
        self.healthy[instance] = healthy
        self.fresh_until_s[instance] = -inf
        snapshot = self.snapshots[instance]
        if snapshot is not None:
            self._unwritten[instance] = snapshot

    def refresh(self) -> None:
        """Rewrite the columns of every instance that has reported and every (instance, model) whose load has changed."""
        if not self._unwritten and not self.overlay.changed:
            return
        for i, snapshot in self._unwritten.items():
            for name, model in snapshot.models.items():
                self._write(i, name, snapshot, model, self.overlay.load(snapshot.instance, name))
            self._write_room(i, snapshot)
        self._rewrite_loads()
        self._unwritten.clear()
        self.overlay.changed.clear()

    def _rewrite_loads(self) -> None:
        """What depends on the overlay, where it has changed and the snapshot has not."""
        for instance, name in self.overlay.changed:
            i = self.index[instance]
            snapshot = self.snapshots[i]
            if snapshot is None or i in self._unwritten:
                continue
            model, load = snapshot.models.get(name), self.overlay.load(instance, name)
            if model is not None and (model.residency is ACTIVE or model.queued or model.in_flight):
                self._write_load(i, name, snapshot, model, load, self._columns[name])
            elif model is not None:
                self._write(i, name, snapshot, model, load)  # the overlay decides whether the next round visits it at all
            self._write_room(i, snapshot)

    def serves(self, instance: int, name: str) -> bool:
        """Whether the model can be placed there: it is listed, and a hot instance never leaves the model it pins."""
        snapshot = self.snapshots[instance]
        if snapshot is None or name not in snapshot.models:
            return False
        return not self._hot[instance] or len(snapshot.models) == 1 or snapshot.models[name].residency is ACTIVE

    def resident_somewhere(self, name: str) -> bool:
        """Whether the last snapshot of a healthy instance has the model resident."""
        return any(
            healthy and snapshot is not None and name in snapshot.models and snapshot.models[name].residency is not ABSENT
            for healthy, snapshot in zip(self.healthy, self.snapshots, strict=True)
        )

    def queued_s(self, instance: int, model: ModelSnapshot, load: Load) -> float:
        """Queued seconds before a new call: snapshot, overlay, leases, misprediction."""
        return model.queued_work_s + (load.work_s + self.overlay.lease_charge_s * load.leases) + self._risk_s[instance]

    def open_price(self, name: str, snapshot: InstanceSnapshot, model: ModelSnapshot) -> float:
        """Right side of Eq. 2 for a replica of the model on the snapshot's instance."""
        nu_s = self._nu_s.get(name, self._knobs.nu_s)
        return open_price_s(snapshot, model, self._knobs.mu0_s_per_gib, nu_s)

    def _write(self, i: int, name: str, snapshot: InstanceSnapshot, model: ModelSnapshot, load: Load) -> None:
        if name not in self._columns:
            self._columns[name] = ModelColumns(len(self.ids))
        columns = self._columns[name]
        timing, table, in_round_at = model.timing, columns.coefficients, len(self.ids) + i
        if columns.timings[i] is not timing:
            columns.timings[i] = timing
            table[1:6, i] = table[1:6, in_round_at] = _timing_rows(timing)
            table[9, in_round_at] = timing.decode_s_per_context_token
        visited = in_round(model, load)
        batch = model.in_flight + 1
        table[0, i] = timing.prefill_base_s + model.activate_s
        table[6, i] = timing.decode_base_s + batch * timing.decode_s_per_sequence
        table[7, i] = batch * timing.decode_s_per_context_token
        table[0, in_round_at] = timing.prefill_base_s + (0.0 if visited else model.activate_s)
        table[8, in_round_at] = timing.decode_s_per_sequence + (0.0 if visited else timing.decode_base_s)
        held = visited or model.residency is not ABSENT
        columns.slot_at_s[i] = snapshot.time_s + model.next_slot_s
        columns.not_held[i] = 0.0 if held and self.healthy[i] else inf
        if held:
            columns.open_price_s[i] = -inf
            if columns.closed:
                columns.closed.discard(i)
        else:
            columns.open_price_s[i] = self.open_price(name, snapshot, model)
            columns.closed.add(i)
        self._write_load(i, name, snapshot, model, load, columns)

    def _write_load(self, i: int, name: str, snapshot: InstanceSnapshot, model: ModelSnapshot, load: Load, columns: ModelColumns) -> None:
        columns.queued_s[i] = self.queued_s(i, model, load)
        if self._hot[i] and not self.serves(i, name):
            room = -1.0
        elif model.residency is ABSENT:  # before it is open, any number where the weights fit
            room = inf if model.weight_bytes <= snapshot.hbm_capacity_bytes else -1.0
        else:
            room = model.free_kv_tokens - load.kv_tokens
            if room < 0.0:
                room = 0.0
        columns.kv_room_tokens[i] = room

    def _write_room(self, i: int, snapshot: InstanceSnapshot) -> None:
        calls, work_s = self.overlay.total(self.ids[i])
        calls += self._seen_calls[i]
        load_s = snapshot.round_load_s + work_s
        self.pressure[i] = calls + load_s / self.round_bound_s
        # A call that fits no round alone still gets its own (SPEC §4.1), so an idle instance has room for any.
        roomy = self._hot[i] or calls == 0
        self.round_room_s[i] = inf if roomy else self.round_bound_s - load_s


def in_round(model: ModelSnapshot, load: Load) -> bool:
    """Whether the next round visits the model anyway, so that its switch is not one more call's doing."""
    return model.residency is ACTIVE or model.queued > 0 or model.in_flight > 0 or load.calls > 0


def _timing_rows(timing: Timing) -> Vector:
    """Coefficients of features 1..5, equal for price and round: prefill of the suffix, recomputation of the prefix."""
    linear, quadratic = timing.prefill_s_per_token, timing.prefill_s_per_token2
    if timing.recompute_s_per_token > 0.0:
        lost = (timing.recompute_base_s - timing.prefill_base_s, timing.recompute_s_per_token, 0.0)
    else:
        lost = (0.0, linear, quadratic)
    return np.array((linear, quadratic, *lost))
