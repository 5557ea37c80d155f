"""What monitoring asks an agent for, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from talaria.gpu.agent.instance import AgentInstance
from talaria.gpu.agent.telemetry import Telemetry


class _Instance(Collector):
    def __init__(self, instance: AgentInstance, telemetry: Telemetry) -> None:
        self._instance, self._telemetry = instance, telemetry

    def collect(self) -> Iterator[Metric]:
        instance = self._instance
        yield GaugeMetricFamily("talaria_agent_healthy", "Whether the instance can serve.", float(instance.healthy()))
        calls = GaugeMetricFamily("talaria_agent_calls", "Calls now.", labels=("model", "state"))
        active = GaugeMetricFamily("talaria_agent_model_active", "Whether the model is the active one.", labels=("model",))
        for name, model in instance.view.models.items():
            for state, items in (("waiting", model.waiting), ("running", model.running), ("held", model.held)):
                calls.add_metric((name, state), len(items))
            active.add_metric((name,), float(name == instance.view.active))
        yield calls
        yield active
        yield GaugeMetricFamily("talaria_agent_rounds", "Rounds since the last reset.", instance.rounds)
        host = instance.memory.host_kv()
        yield GaugeMetricFamily("talaria_agent_host_kv_bytes", "Host memory that holds KV, over all ranks.", host.used)
        yield GaugeMetricFamily("talaria_agent_host_kv_capacity_bytes", "Host memory for KV, over all ranks.", host.capacity)
        yield CounterMetricFamily("talaria_agent_host_kv_restored_bytes", "KV brought back to devices, over all ranks.", host.restored)
        yield CounterMetricFamily("talaria_agent_host_kv_evicted_pages", "Pages of KV that made room on the host.", host.evicted_pages)
        failed = "Copies of KV to and from the host that failed, rank by rank."
        yield CounterMetricFamily("talaria_agent_host_kv_failed_copies", failed, host.failed_copies)
        staged = instance.group.staged()
        yield GaugeMetricFamily("talaria_agent_staging_coverage", "Share of the next model's weights on the devices.", staged.coverage)
        yield GaugeMetricFamily("talaria_agent_staging_clean_bytes", "Of these weights, over all ranks.", staged.clean_bytes)
        yield GaugeMetricFamily("talaria_agent_staging_dirty_bytes", "Of these weights, what KV has overwritten.", staged.dirty_bytes)
        yield GaugeMetricFamily("talaria_agent_staging_slack_bytes", "Free KV that has room for more of them.", staged.slack_bytes)
        target = GaugeMetricFamily("talaria_agent_staging_target", "Whether the model is being staged.", labels=("model",))
        for name in instance.view.models:
            target.add_metric((name,), float(name == staged.target))
        yield target
        ended = CounterMetricFamily("talaria_agent_calls_ended", "Calls that have ended.", labels=("outcome",))
        for outcome, count in self._telemetry.calls.items():
            ended.add_metric((outcome,), count)
        yield ended
        switches = CounterMetricFamily("talaria_agent_switches", "Switches and opens.", labels=("path",))
        moved = CounterMetricFamily("talaria_agent_switch_bytes", "Weights moved, by the rank that moved most.", labels=("way",))
        for path, count in self._telemetry.switches.items():
            switches.add_metric((path,), count)
        for way, nbytes in self._telemetry.moved_bytes.items():
            moved.add_metric((way,), nbytes)
        yield switches
        yield moved


def exposition(instance: AgentInstance | None, telemetry: Telemetry) -> bytes:
    registry = CollectorRegistry()
    if instance is not None:
        registry.register(_Instance(instance, telemetry))
    return generate_latest(registry)
