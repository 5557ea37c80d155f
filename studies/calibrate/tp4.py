"""The TP=4 testbed: the published placement at three loads under three routers, and the sweep of the lease timeout.

An issue starts its three model-sessions at once, and the next one follows after a fixed interval. By that alone medium load is what is
published: under ``full`` two of the three run through and the third waits; under ``least-pressure`` returns open; under
``session-sticky`` two models of an issue take turns on one worker. A lost prefix has a price of its own, as on the TP=8 testbed: by it
``least-pressure`` is slowest at high load. Searches of some 200 trials found where to start; the starts were then chosen by hand among
values that fit alike, by means over draws 0 to 99, for trends of the sweep that ten draws show at every step more often than not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from studies.calibrate.draft import Draft
from studies.calibrate.parameters import arrivals, hardware, knob, models, parameter, telemetry, workload
from studies.calibrate.testbed import Order, Testbed, published
from talaria.reproduce.experiments import LOADS, ROUTERS, TAU_SWEEP, TAUS, Experiment

PLACEMENT = tuple(f"paper-tp4-{load}" for load in LOADS)
_, MEDIUM, HIGH = PLACEMENT
ISSUES = "staggered:{:g}:3"
"""Every so many seconds the next issue: one session on each of the three models."""
OUTPUT_SIGMA = 1.0


def _outputs(draft: Draft, median: float) -> None:
    """The law's median, and its mean as what policies expect."""
    for name in (*PLACEMENT, TAU_SWEEP):
        draft.scenarios[name]["workload"]["output_median_tokens"] = median
    for model in draft.profile["models"].values():
        draft.set_quantity(model, "output_tokens_prior", float(round(median * math.exp(OUTPUT_SIGMA**2 / 2))))


PARAMETERS = (
    parameter(
        "call_overhead",
        "s",
        (0.0, 0.3135, 0.35),
        "two HTTP hops, and tokenising some 20K tokens: tenths of a second at most",
        hardware("call_overhead_s"),
    ),
    parameter("open", "s", (0.5, 1.12, 2.0), "0.5 s of H2D from a warm host image, and set-up", models("open_s"), log=True),
    parameter(
        "lost_slope",
        "s/token",
        (1.5e-5, 1.8e-5, 8.8e-5),
        "prefill of new tokens, to the published slope of the TP=8 testbed",
        models("recompute_s_per_token"),
        log=True,
    ),
    parameter("output_median", "tokens", (25, 32.2, 145), "first calls are short commands; all calls: 145", _outputs, log=True),
    parameter("heartbeat", "s", (1.0, 3.5, 5.0), "open; below the five seconds after which a snapshot is stale", telemetry("heartbeat_s")),
    parameter("gamma", "", (0.3, 0.6, 1.0), "open; below 1", knob("gamma")),
    parameter("linger", "s", (0.1, 1.1, 1.5), "open; below the gap's p95", knob("linger")),
    parameter("t_tpot", "s", (0.03, 0.09, 0.15), "open; 7 to 33 tokens a second", knob("t_tpot"), log=True),
    parameter("interval_medium", "s", (8.0, 14.06, 40.0), "issues meet now and then", arrivals(ISSUES, MEDIUM), log=True),
    parameter("interval_high", "s", (2.0, 3.55, 8.0), "issues overlap, near saturation", arrivals(ISSUES, HIGH), log=True),
    parameter("interval_sweep", "s", (3.0, 5.0, 30.0), "near high load", arrivals(ISSUES, TAU_SWEEP), log=True),
    parameter("sweep_gap_median", "s", (0.4, 0.8, 10.0), "the regime's, and longer", workload("gap_median_s", TAU_SWEEP), log=True),
    parameter("sweep_gap_sigma", "", (0.65, 2.0, 2.5), "the regime's, and wider", workload("gap_sigma", TAU_SWEEP)),
    parameter("lease_charge", "s", (0.05, 0.5, 2.0), "one admission: a suffix's prefill to an open", knob("lease_charge"), log=True),
)

_ERRORS = {"same_instance": 0.15, "residency_hit": 0.1, "unused_lease": 0.3, "full_same_worker_returns": 0.05}
_ROUTERS = ("least_pressure", "session_sticky", "full")
_ERRORS |= {f"{measure}/{router}": 0.15 for measure in ("ttft_p95_s", "ttft_p50_s", "sct_p50_s") for router in _ROUTERS}
_ERRORS |= {f"return_ttft_{percentile}_s": 0.26 for percentile in ("p50", "p95")}
_OPENS = {f"avoidable_opens/{router}": 2.0 for router in _ROUTERS} | {"/opens": 6.0}
_WEIGHTS = {"return_ttft_p95_s": 0.25, "same_instance": 0.5, "unused_lease": 0.25}
_WEIGHTS |= {f"avoidable_opens/{router}": 2.0 for router in _ROUTERS[:2]}


def _rising(metric: str, keys: Iterable[Experiment], factor: float, weight: float = 2.0) -> tuple[Order, ...]:
    """The metric rises from each experiment to the next, by the share that ``factor`` leaves."""
    return tuple(Order(metric, low, high, factor, weight=weight) for low, high in pairwise(keys))


def _orders() -> tuple[Order, ...]:
    taus = [Experiment(TAU_SWEEP, "talaria", tau) for tau in TAUS]
    medium = [Experiment(MEDIUM, router) for router in ("full", "least-pressure", "session-sticky")]
    return (
        *_rising("ttft_p95_s", [Experiment(HIGH, router) for router in reversed(ROUTERS)], 0.9),
        *_rising("ttft_p50_s", medium, 0.9),
        *_rising("same_instance_return", taus, 0.985, weight=4.0),
        *_rising("residency_hit", taus[::-1], 0.985, weight=4.0),
    )


TESTBED = Testbed(
    name="tp4",
    profile="paper-tp4",
    scenarios=(*PLACEMENT, TAU_SWEEP),
    parameters=PARAMETERS,
    fitted=published(("placement", "tau"), _ERRORS, _WEIGHTS, _OPENS),
    orders=_orders(),
    search_seeds=range(0, 16),
    polish_seeds=range(0, 16),
)
