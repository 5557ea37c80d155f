"""What Prometheus scrapes from the gateway."""

from __future__ import annotations

from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from talaria.gpu.gateway.calls import LiveCall

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """A registry of its own, so that several gateways fit one process. What has labels is a function of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.accepted = cache(
            Counter("talaria_calls_accepted", "Calls that passed authentication and limits.", ["model"], registry=registry).labels
        )
        self.ended = cache(
            Counter(
                "talaria_calls_ended", "Calls by how they ended: completed, shed or failed.", ["model", "outcome"], registry=registry
            ).labels
        )
        self.refused = cache(
            Counter(
                "talaria_requests_refused", "Requests refused before they became calls, by HTTP status.", ["status"], registry=registry
            ).labels
        )
        self.placed = cache(
            Counter("talaria_placements", "Placements by instance and reason.", ["instance", "reason"], registry=registry).labels
        )
        self.retried = Counter("talaria_placements_retried", "Calls placed again since an instance did not take them.", registry=registry)
        self.in_flight = Gauge("talaria_calls_in_flight", "Calls whose answer is not complete.", registry=registry)
        self.sessions = Gauge("talaria_sessions", "Sessions in the gateway's book.", registry=registry)
        self.up = cache(
            Gauge("talaria_instance_up", "1 where an instance's link is up and it is healthy.", ["instance"], registry=registry).labels
        )
        self.prompt_tokens = cache(
            Counter("talaria_prompt_tokens", "Prompt tokens of calls that ended.", ["model"], registry=registry).labels
        )
        self.cached_tokens = cache(
            Counter("talaria_cached_tokens", "Prompt tokens found on the device or restored.", ["model", "tier"], registry=registry).labels
        )
        self.output_tokens = cache(
            Counter("talaria_output_tokens", "Output tokens of calls that ended.", ["model"], registry=registry).labels
        )
        self.ttft_s = cache(
            Histogram(
                "talaria_ttft_seconds", "Enqueue to first token, schedule-aware.", ["model"], buckets=_SECONDS, registry=registry
            ).labels
        )
        self.place_s = Histogram(
            "talaria_place_seconds", "Time that a placement takes on the event loop.",
            buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02), registry=registry,
        )  # fmt: skip
        self.switches = cache(
            Counter("talaria_switches", "Switches and opens by instance and path.", ["instance", "path"], registry=registry).labels
        )

    def call_ended(self, live: LiveCall) -> None:
        model, word = live.call.key.model, live.word
        self.ended(model, live.outcome).inc()
        if word is not None:
            self.prompt_tokens(model).inc(word.prompt_tokens)
            self.cached_tokens(model, "device").inc(word.device_tokens)
            self.cached_tokens(model, "host").inc(word.host_tokens)
            self.output_tokens(model).inc(word.output_tokens)
            if word.first_token_s >= 0.0:
                self.ttft_s(model).observe(max(0.0, word.first_token_s - live.call.enqueued_s))
