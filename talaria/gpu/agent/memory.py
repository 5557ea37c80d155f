"""What devices and host hold for the calls of an instance, as far as its engines tell."""

from __future__ import annotations

from collections.abc import Mapping

from talaria.gpu.agent.calls import AgentCall
from talaria.gpu.agent.host import Engines, HostKv
from talaria.gpu.agent.lines import LineBook
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.protocol.engine import Hello
from talaria.policy.instance import EngineView


class PrefixMemory:
    """``view``, ``runs`` and ``limits`` (of engines that were up) are the instance's own, and are read as they are at the moment."""

    def __init__(self, engines: Engines, view: EngineView, runs: Mapping[int, AgentCall], limits: Mapping[str, Hello]) -> None:
        self.lines = LineBook(self.tiers)
        self._engines, self._view, self._runs, self._limits = engines, view, runs, limits
        self._versions: dict[str, tuple[int, int]] = {}
        """Of the device's and the host's KV as of the last snapshot, by model."""
        self._looked: tuple[str | None, int, int] = (None, 0, 0)
        """Model and versions of its KV as of the last look at waiting calls."""

    def cached_tokens(self, model: str, prompt: PageChain) -> int:
        """Nothing survives on the device while another model is active."""
        return self._engines.cached_tokens(model, prompt) if model == self._view.active else 0

    def tiers(self, model: str, prompt: PageChain) -> tuple[int, int]:
        """Tokens of the prompt that are on the device, and tokens up to which the host continues them."""
        device = self.cached_tokens(model, prompt)
        return device, self._engines.restorable_tokens(model, prompt, device)

    def host_kv(self) -> HostKv:
        return self._engines.host_kv()

    def free_tokens(self, model: str) -> int:
        """KV that could be allocated now, evicting idle prefixes: all but what calls in flight hold on the device."""
        view = self._view.models[model]
        held = sum(item.call.prompt_tokens + item.generated_tokens for item in view.held.values() if self._runs[item.call.id].on_device)
        running = sum(item.call.prompt_tokens + item.generated_tokens for item in view.running.values())
        return max(0, self._limits[model].kv_tokens - held - running)

    def most_prompt_tokens(self, model: str) -> int:
        """The longest prompt that its engine takes."""
        limits = self._limits[model]
        return min(limits.kv_tokens, limits.context_tokens) - 1

    def look(self, run: AgentCall) -> None:
        """Where the call's prefix is right now."""
        device, end = (0, 0) if run.chain is None else self.tiers(run.model, run.chain)
        run.view.device_tokens, run.view.host_tokens = device, end - device

    def lose(self, model: str) -> None:
        """Nothing of the model's KV survives on the device from here on."""
        for run in self._runs.values():
            if run.model == model:
                run.on_device = False

    def refresh_view(self) -> None:
        """What the scheduler reads of the active model's memory, as it is now."""
        active = self._view.active
        if active is None or not (model := self._view.models[active]).waiting:
            return
        model.free_kv_tokens = self.free_tokens(active)
        now = (active, self._engines.kv_version(active), self._engines.host_version())
        if now != self._looked:
            self._looked = now
            for call_id in model.waiting:
                self.look(self._runs[call_id])

    def doubt_lines(self) -> None:
        """The states of lines are looked up again where their model's KV or the host's has changed, or has left the device."""
        for name in self._view.models:
            versions = (self._engines.kv_version(name) if name == self._view.active else -1, self._engines.host_version())
            if self._versions.get(name) != versions:
                self._versions[name] = versions
                self.lines.doubt(name)
