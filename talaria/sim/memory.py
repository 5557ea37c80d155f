"""The memory of one simulated TP group: the real substrate objects, moved along in simulated time.

Device KV belongs to the active model and lives in the pool that the bump layout leaves it; host KV of all models lives in
the registry; the next model's weights are staged into the clean tail of the KV region. Copies take time: a checkpoint is
exposed when its transfer is over, staging advances with the clock. Ranks are symmetric, so one set of books stands for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from talaria.policy.calls import LineKey
from talaria.policy.snapshot import DEVICE, HOST, MISSING, LineState
from talaria.profiles import Profile
from talaria.sim.engine import Run
from talaria.sim.variation import SwitchCost
from talaria.substrate.device import DeviceCache
from talaria.substrate.layout import BumpLayout, ModelMemory, Regions
from talaria.substrate.pages import PagePool
from talaria.substrate.prefix import PrefixForest, Spans
from talaria.substrate.registry import Hold, HostRegistry, Ticket
from talaria.substrate.staging import StagingMap
from talaria.substrate.switch import plan_switch

TOO_LARGE = "the context is larger than the KV pool"
NO_ROOM = "no free KV"


def layouts(profile: Profile, models: Iterable[str]) -> tuple[BumpLayout, dict[str, ModelMemory]]:
    """The managed buffer of one GPU, and what each model needs of it. Raises LayoutError if the buffer is impossible."""
    hardware = profile.hardware
    layout = BumpLayout(hardware.bump_bytes, hardware.device_cap_bytes)
    needs = {
        name: ModelMemory(
            name, profile.model(name).weight_bytes, profile.model(name).kv_bytes_per_token * hardware.page_tokens, hardware.runtime_bytes,
            residue_bytes=hardware.residue_bytes,
        )
        for name in models
    }  # fmt: skip
    return layout, needs


class InstanceMemory:
    """Books of one instance. Times are absolute seconds of the simulation; they never go back."""

    def __init__(self, profile: Profile, models: tuple[str, ...], forest: PrefixForest, *, hkvr: bool, swap: bool) -> None:
        self._hardware = profile.hardware
        self._numbers = {name: profile.model(name) for name in models}
        self._layout, self._needs = layouts(profile, models)
        self._regions: dict[str, Regions] = {name: self._layout.regions(need) for name, need in self._needs.items()}
        self._captured: dict[str, Regions] = {}
        """Opened models, with the regions that their graphs were captured for."""
        self._forest = forest
        self._hkvr = hkvr
        self._swap = swap
        page_tokens = self._hardware.page_tokens
        self._registry = HostRegistry(self._hardware.host_kv_bytes if hkvr else 0, 1, page_tokens, forest=forest)
        self._spacing_tokens: dict[str, int] = {}
        """Of the checkpoints of recurrent state, in whole pages; 0 for pure attention."""
        for name, numbers in self._numbers.items():
            spacing = -(-max(1, numbers.checkpoint_tokens) // page_tokens) * page_tokens if numbers.family == "recurrent" else 0
            self._spacing_tokens[name] = spacing
            self._registry.register(name, numbers.family, spacing)
        self._cache: DeviceCache | None = None
        self._active: str | None = None
        self._staging: StagingMap | None = None
        self._staging_since_s = 0.0
        self._staging_offered_bytes = 0
        self._staging_bytes_per_s = 0.0
        self._copies: deque[tuple[float, Ticket]] = deque()
        """Checkpoints under way and when each is over, one after the other on the link."""
        self._link_free_s = 0.0
        self._pins: dict[int, Hold] = {}
        """By call, while its restore is under way."""
        self._kept: dict[int, Hold] = {}
        """By call whose KV left the device in flight: the part that the registry holds."""
        self._paths: dict[LineKey, tuple[int, int]] = {}
        """Where the last call of each line ended: its node, and tokens along its path."""
        self._evictions_seen = (0, 0)
        self._changes = 0
        """Of anything that ``prefix`` depends on; until the next one its answers stand."""
        self.pool_tokens = {name: regions.kv_pages * page_tokens for name, regions in self._regions.items()}
        """What each model's KV region holds while it is active."""
        self.weight_bytes = {name: numbers.total_weight_bytes for name, numbers in self._numbers.items()}
        self.capacity_bytes = self._hardware.hbm_bytes * self._hardware.tp
        self.host_weight_bytes = 0
        """Of the images of opened models."""
        self.host_capacity_misses = 0
        self.peak_bytes = 0

    # --- prefixes --------------------------------------------------------------------------------------------------

    def prefix(self, run: Run, active: str | None, now_s: float) -> tuple[int, int]:
        """(device, host) tokens of the call's prompt that need no recomputation; its last token is always computed."""
        if self._copies and self._copies[0][0] <= now_s:
            self._settle(now_s)
        as_of, device, host = run.known
        if as_of == self._changes:
            return device, host
        call = run.view.call
        model, page_tokens = call.key.model, self._hardware.page_tokens
        spans, device = self._forest.spans(run.node, (call.prompt_tokens - 1) // page_tokens * page_tokens), 0
        if model == active:
            device = self._resumable(model, spans, self._end_before(run) if self._spacing_tokens[model] else 0)
        host = self._registry.match(model, spans, device) - device
        run.known = self._changes, device, host
        return device, host

    def _resumable(self, model: str, spans: Spans, end_tokens: int) -> int:
        """Tokens of a path after which the active model can go on from what is on the device.

        Attention can anywhere. Recurrent state is there at checkpointed positions (SPEC §5.2) and where the last call of a
        line ended (SPEC §5.5), which is ``end_tokens`` on this path.
        """
        matched, spacing = self._cache.match(spans) if self._cache is not None else 0, self._spacing_tokens[model]
        if not spacing:
            return matched
        end = end_tokens // self._hardware.page_tokens * self._hardware.page_tokens
        return max(matched // spacing * spacing, end if end <= matched else 0)

    def _end_before(self, run: Run) -> int:
        """End of the last call of a line that the prompt continues past; 0 for a rewrite or a new line."""
        call, forest, end = run.view.call, self._forest, 0
        for line, _ in call.continues:
            key = call.key if line == call.key.line else call.key._replace(line=line)
            node, tokens = self._paths.get(key, (-1, 0))
            if tokens > end and node in forest and forest.common(node, run.node) >= tokens:
                end = tokens
        return end

    def admit(self, run: Run, grant: int, now_s: float) -> str | None:
        """Reserve the KV of prompt and grant and pin what is to be restored. None, or why not: ``TOO_LARGE`` or ``NO_ROOM``."""
        assert self._cache is not None
        call = run.view.call
        run.device_tokens, run.host_tokens = self.prefix(run, call.key.model, now_s)
        cached = run.device_tokens + run.host_tokens
        run.lost_tokens = max(0, call.reusable_tokens - cached)
        tokens = call.prompt_tokens + min(grant + 1, run.output_tokens)
        if tokens > self.pool_tokens[call.key.model]:
            return TOO_LARGE
        spans = self._forest.spans(run.node, tokens)
        if run.host_tokens:
            self._pins[call.id] = self._registry.pin(call.key.model, spans, cached)
        if not self._allocate((), spans, now_s):
            self.restored(run)
            return NO_ROOM
        run.spans = spans
        if self._hkvr and run.lost_tokens > self._hardware.page_tokens:
            self.host_capacity_misses += self._was_evicted(run)
        return None

    def _was_evicted(self, run: Run) -> bool:
        """Whether the call lost a prefix that was computed here; a restore declined for its recurrent state is another matter.

        Never restorable was the last page, and what lies beyond the last checkpoint of recurrent state.
        """
        call, forest = run.view.call, self._forest
        unit_tokens = max(self._hardware.page_tokens, self._numbers[call.key.model].checkpoint_tokens)
        if run.lost_tokens <= unit_tokens:
            return False
        declined = self._registry.declines(call.key.model, forest.spans(run.node, call.prompt_tokens), run.device_tokens)
        served = self._paths.get(call.key, (-1, 0))[0]
        return not declined and served in forest and forest.common(served, run.node) >= call.reusable_tokens - unit_tokens

    def restored(self, run: Run) -> None:
        """The restore of an admitted call is over: its DMA pins go."""
        pin = self._pins.pop(run.view.call.id, None)
        if pin is not None:
            self._registry.unpin(pin)

    def resume(self, run: Run, grant: int, now_s: float) -> str | None:
        """Reserve the KV of one more grant; a swapped call gets its pages back. None, or why not, as in ``admit``."""
        call = run.view.call
        tokens = call.prompt_tokens + min(run.view.generated_tokens + grant, run.output_tokens)
        if tokens > self.pool_tokens[call.key.model]:
            return TOO_LARGE
        spans, held = self._forest.spans(run.node, tokens), () if run.swapped else run.spans
        if not self._allocate(held, spans, now_s):
            return NO_ROOM
        run.spans, run.swapped = spans, False
        self._let_go(run)
        return None

    def restorable(self, run: Run) -> int:
        """Tokens of an in-flight call's context that the registry holds."""
        return self._registry.match(run.view.call.key.model, self._forest.spans(run.node, run.context_tokens))

    def _allocate(self, held: Spans, spans: Spans, now_s: float) -> bool:
        """Lock ``spans`` in place of ``held``; staged chunks that new pages overlap are dirty."""
        cache, staging = self._cache, self._staging
        assert cache is not None and staging is not None
        if cache.pool.stays_below(staging.reach_page, -(-spans[-1][2] // cache.page_tokens)):
            done = cache.lock(spans, now_s, held=held)
        else:
            done = self._allocate_in_tail(held, spans, now_s)
        taken = cache.take_new_extents()
        if taken:
            self._changes += 1
            staging.dirty(taken)
        return done

    def _allocate_in_tail(self, held: Spans, spans: Spans, now_s: float) -> bool:
        """Take pages around the chunk that staging is writing, or give that chunk up if there is no other room."""
        cache, staging = self._cache, self._staging
        assert cache is not None and staging is not None
        self._advance_staging(now_s)
        writing = staging.in_flight_pages
        if writing is not None:
            cache.pool.block(*writing)
        done = cache.lock(spans, now_s, held=held)
        if writing is not None:
            cache.pool.unblock(*writing)
            if not done:
                staging.cancel_in_flight()
                done = cache.lock(spans, now_s, held=held)
        return done

    def finish(self, run: Run, now_s: float) -> None:
        """The call is complete: its KV turns into idle cache, and a copy to the host begins."""
        assert self._cache is not None
        call = run.view.call
        tokens = call.prompt_tokens + run.output_tokens - 1
        self._changes += 1
        self._cache.release(run.spans, tokens, now_s)
        self._paths[call.key] = (run.node, tokens)
        if self._hkvr:
            self._checkpoint(run, tokens, now_s)

    def drop(self, run: Run, now_s: float) -> None:
        """The call will not go on here; what its prompt computed may serve others."""
        self.restored(run)
        self._let_go(run)
        self._changes += 1
        if self._cache is not None and run.spans and not run.swapped:
            self._cache.release(run.spans, run.view.call.prompt_tokens if run.view.generated_tokens else 0, now_s)
        run.spans, run.saved_tokens = (), 0  # its host buffer goes with it

    def _checkpoint(self, run: Run, tokens: int, now_s: float) -> None:
        key = run.view.call.key
        numbers, hardware = self._numbers[key.model], self._hardware
        spans, bytes_per_token = self._forest.spans(run.node, tokens), numbers.kv_bytes_per_token * hardware.tp
        ticket = self._registry.checkpoint(key.model, spans, bytes_per_token, now_s, owner=key)
        if ticket is not None:
            begins_s = max(now_s, self._link_free_s)
            self._link_free_s = begins_s + ticket.bytes / hardware.tp / hardware.d2h_bytes_per_s
            self._copies.append((self._link_free_s, ticket))

    def _settle(self, now_s: float) -> None:
        """Expose the checkpoints whose copies are over by now."""
        self._changes += 1
        while self._copies and self._copies[0][0] <= now_s:
            self._registry.commit_all(self._copies.popleft()[1])

    def protect(self, key: LineKey, leased: bool) -> None:
        """A leased line's KV is evicted from the host last."""
        if leased:
            self._registry.protected.add(key)
        else:
            self._registry.protected.discard(key)

    def line_state(self, key: LineKey, last_use_s: float, now_s: float) -> LineState:
        """What the router may know of a line that was served here."""
        if self._copies and self._copies[0][0] <= now_s:
            self._settle(now_s)
        node, tokens = self._paths[key]
        spans = self._forest.spans(node, tokens)
        if key.model == self._active:
            device = self._resumable(key.model, spans, tokens)
            if device > 0:
                return LineState(DEVICE, self._registry.match(key.model, spans, device), last_use_s)
        host = self._registry.match(key.model, spans)
        return LineState(HOST if host else MISSING, host, last_use_s)

    def forget(self, key: LineKey) -> None:
        self._changes += 1
        self._paths.pop(key, None)
        self._registry.protected.discard(key)

    def evicted(self) -> bool:
        """Whether anything was evicted since this was last asked: what is known of prefixes may be stale."""
        device = self._cache.evicted_pages if self._cache is not None else 0
        seen, self._evictions_seen = self._evictions_seen, (device, self._registry.evictions)
        return seen != self._evictions_seen

    def free_tokens(self) -> int:
        return self._cache.free_tokens() if self._cache is not None else 0

    # --- models ----------------------------------------------------------------------------------------------------

    def open(self, model: str) -> None:
        """``model`` leaves ``absent``: it has a host image, captured graphs and shells from now on."""
        if model not in self._captured:
            self.host_weight_bytes += self.weight_bytes[model]
        self._captured[model] = self._regions[model]
        self.peak_bytes = max(self.peak_bytes, self._layout.peak_bytes(self._needs[name] for name in self._captured))

    def close(self, model: str) -> None:
        del self._captured[model]
        self.host_weight_bytes -= self.weight_bytes[model]

    def activate(self, model: str) -> None:
        """The KV region of ``model`` begins, empty."""
        if model not in self._captured:
            self.open(model)
        regions, numbers, hardware = self._regions[model], self._numbers[model], self._hardware
        self._active = model
        self._changes += 1
        self._cache = DeviceCache(PagePool(regions.kv_pages), hardware.page_tokens, self._forest)
        page_bytes = max(1, numbers.kv_bytes_per_token * hardware.page_tokens // numbers.layers)
        self._staging = StagingMap(numbers.layers, hardware.chunk_bytes, regions.kv_pages, page_bytes)
        self._evictions_seen = (0, self._registry.evictions)

    def stage(self, model: str, rate: float, now_s: float) -> None:
        assert self._staging is not None and self._cache is not None
        self._staging.begin(model, self._numbers[model].weight_bytes, self._cache.pool.high_water)
        self._staging_since_s, self._staging_offered_bytes = now_s, 0
        self._staging_bytes_per_s = rate * self._hardware.staging_bytes_per_s

    def unstage(self) -> None:
        if self._staging is not None:
            self._staging.cancel()

    def _advance_staging(self, now_s: float) -> None:
        staging = self._staging
        if staging is None or staging.target is None or self._cache is None:
            return
        # The link's bytes since the target was set, so that it does not matter how often anybody looks.
        offered = int((now_s - self._staging_since_s) * self._staging_bytes_per_s)
        more = offered - self._staging_offered_bytes
        self._staging_offered_bytes = offered
        if not staging.coast(more):
            staging.advance(more, self._cache.pool.high_water)

    def staged(self, now_s: float) -> tuple[str | None, float]:
        """(model being staged, share of its weights that is clean by now)."""
        staging = self._staging
        if staging is None or staging.target is None:
            return None, 0.0
        self._advance_staging(now_s)
        return staging.target, staging.coverage()

    def slack_bytes(self) -> int:
        """Bytes of the KV region that could take more staged weights than ``staged`` has just told of."""
        return self._tail_slack_bytes(self._staging) * self._hardware.tp if self._staging is not None else 0

    def _tail_slack_bytes(self, staging: StagingMap) -> int:
        if staging.target is not None and self._cache is not None:
            high_water = self._cache.pool.high_water
            if high_water != staging.tail_first_page:
                staging.move_tail(high_water)
        return staging.slack_bytes

    def link_contention(self, now_s: float) -> float:
        """How much slower other H2D copies are while staging is at work."""
        return self._hardware.contention_factor if self._is_staging(now_s) else 1.0

    def serving_slowdown(self, now_s: float) -> float:
        """How much slower prefill and decode are while staging is at work beside them."""
        factor = self._hardware.staging_interference
        return factor if factor > 1.0 and self._is_staging(now_s) else 1.0

    def _is_staging(self, now_s: float) -> bool:
        staging = self._staging
        if staging is None or staging.target is None:
            return False
        self._advance_staging(now_s)
        return staging.clean_bytes < staging.weight_bytes and self._tail_slack_bytes(staging) > 0

    def plan_switch(self, source: str | None, target: str, held: list[Run], open_s: float, now_s: float) -> SwitchCost:
        """Tear ``source`` down: drain its checkpoints, move its in-flight KV away, release its region (SPEC §5.4)."""
        contention = self.link_contention(now_s)
        staged = self._staging is not None and self._staging.target is not None
        self._changes += 1
        numbers, hardware = self._numbers[target], self._hardware
        plan = plan_switch(
            source, target, numbers.weight_bytes, registry=self._registry, staging=self._staging, captured=self._captured.get(target),
            regions=self._regions[target],
        )  # fmt: skip
        coverage, dirty = (self._staging.coverage(), self._staging.dirty_share()) if plan.gather and self._staging else (0.0, 0.0)
        drain_s = 0.0
        for run in held:
            drain_s += self.swap_out(run, now_s)
        if plan.drain:
            drain_s += self._drain({ticket.id for ticket in plan.drain}, now_s)
        if self._cache is not None:
            self._cache.clear()
        self._cache, self._staging, self._active = None, None, None
        phases = hardware.phases_s(staged)
        if plan.path == "open":
            gather_s, load_s = 0.0, max(0.0, open_s - sum(phases))
        else:
            gather_s = plan.d2d_bytes / hardware.d2d_bytes_per_s
            load_s = plan.h2d_bytes / hardware.h2d_bytes_per_s * contention
        return SwitchCost(plan.path, drain_s, phases, gather_s, load_s, coverage, dirty, plan.d2d_bytes, plan.h2d_bytes)

    def swap_out(self, run: Run, now_s: float) -> float:
        """In-flight KV leaves the device, to host buffers of its own (swap) or only as far as the registry takes it.

        Returns the seconds that it takes; none if it has left already. What has a copy on the host, in the registry or from an
        earlier slot, needs no other.
        """
        if run.swapped or self._cache is None:
            return 0.0
        self._changes += 1
        moved_s = 0.0
        if self._swap:
            model, tokens = run.view.call.key.model, run.context_tokens
            unsaved_tokens = tokens - max(run.saved_tokens, self._keep(run) if self._hkvr else 0)
            run.saved_tokens = tokens
            moved_s = unsaved_tokens * self._numbers[model].kv_bytes_per_token / self._hardware.d2h_bytes_per_s
        elif self._hkvr:
            self._checkpoint(run, run.context_tokens - 1, now_s)
        self._cache.release(run.spans, 0, now_s)
        run.swapped = True
        return moved_s

    def _keep(self, run: Run) -> int:
        """Tokens of an in-flight call's context that the registry holds, pinned there until the call is back."""
        call = run.view.call
        spans = self._forest.spans(run.node, run.context_tokens)
        tokens = self._registry.match(call.key.model, spans)
        if tokens:
            self._kept[call.id] = self._registry.pin(call.key.model, spans, tokens)
        return tokens

    def _let_go(self, run: Run) -> None:
        kept = self._kept.pop(run.view.call.id, None)
        if kept is not None:
            self._registry.unpin(kept)

    def _drain(self, outstanding: set[int], now_s: float) -> float:
        """Wait for the source's copies; other models' copies go on beside (SPEC §5.2, switch barrier)."""
        kept: deque[tuple[float, Ticket]] = deque()
        until_s = now_s
        for due_s, ticket in self._copies:
            if ticket.id in outstanding:
                until_s = max(until_s, due_s)
                self._registry.commit_all(ticket)
            else:
                kept.append((due_s, ticket))
        self._copies = kept
        return until_s - now_s

    def crash(self) -> None:
        """The engine process is gone: device KV, staged weights and unfinished copies with it; the registry survives."""
        self._changes += 1
        for _, ticket in self._copies:
            self._registry.abort(ticket)
        self._copies.clear()
        if self._cache is not None:
            self._cache.clear()
        self._cache, self._staging, self._active = None, None, None

    # --- sizes, over all ranks -------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Weights of the active model, locked KV, and what opened models leave on the device."""
        used = len(self._captured) * self._hardware.residue_bytes
        if self._cache is not None and self._active is not None:
            numbers = self._numbers[self._active]
            used += numbers.weight_bytes + self._cache.locked_pages * self._hardware.page_tokens * numbers.kv_bytes_per_token
        return used * self._hardware.tp

    def footprint(self) -> tuple[int, int, int]:
        """(weights, resident KV with idle cache, staged weights) of one GPU, in bytes."""
        if self._cache is None or self._active is None or self._staging is None:
            return 0, 0, 0
        numbers = self._numbers[self._active]
        return numbers.weight_bytes, self._cache.resident_tokens * numbers.kv_bytes_per_token, self._staging.clean_bytes

    def host_kv_bytes(self) -> int:
        return self._registry.used_bytes

    @property
    def restore_skips(self) -> Mapping[str, int]:
        return self._registry.restore_skips

    def audit(self) -> list[str]:
        """What does not balance when all calls have ended; empty in a correct run."""
        self._settle(float("inf"))
        wrong = []
        if self._pins or self._kept:
            wrong.append(f"{len(self._pins) + len(self._kept)} DMA pins left")
        if self._registry.held_bytes:
            wrong.append(f"{self._registry.held_bytes} bytes of the host registry still held")
        if self._cache is not None:
            if self._cache.locked_pages:
                wrong.append(f"{self._cache.locked_pages} pages still locked")
            if self._cache.pool.used * self._hardware.page_tokens != self._cache.resident_tokens:
                wrong.append("pages in use differ from pages that hold a prefix")
        return wrong
