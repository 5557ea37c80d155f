"""The TP=8 testbed: the published replay of 30 sessions under five configurations, and its switches."""

from __future__ import annotations

from itertools import pairwise

from studies.calibrate.draft import Draft
from studies.calibrate.parameters import Parameter, hardware, knob, models, workload
from studies.calibrate.testbed import Order, Testbed, published
from talaria.reproduce.checks import RISING
from talaria.reproduce.experiments import REPLAY, Experiment


def _output_prior(draft: Draft, median: float) -> None:
    """What policies expect of an output is the law's mean: sigma 1, so e^0.5 times its median."""
    for model in draft.profile["models"].values():
        draft.set_quantity(model, "output_tokens_prior", round(1.6487 * median))


PARAMETERS = (
    Parameter(
        "depth_sigma",
        "",
        0.45,
        0.908,
        0.6,
        "spread of session depths: between the recipe's and that of the published regime",
        (workload("depth_sigma"),),
    ),
    Parameter(
        "output_median",
        "tokens",
        70.0,
        160.0,
        110.0,
        "public agent traces have medians of 100 to 150; only output times T_TPOT shows",
        (workload("output_median_tokens"), _output_prior),
    ),
    Parameter(
        "t_tpot", "s", 0.05, 0.2, 0.09, "open in the source; 5 to 20 tokens a second is what agents bear", (knob("t_tpot"),), log=True
    ),
    Parameter("gamma", "", 0.7, 1.0, 1.0, "the source asks for less than one; published rounds last 8.2 and 8.8 s of 10", (knob("gamma"),)),
    Parameter("linger", "s", 0.5, 2.5, 1.5, "covers most gaps, whose p95 is 1.32 s", (knob("linger"),)),
    Parameter("decode_base", "s", 0.003, 0.009, 0.005, "b200's models take 3 to 9 ms a step", (models("decode_base_s"),), log=True),
    Parameter(
        "h2d",
        "B/s",
        20e9,
        50e9,
        33e9,
        "eight links that share host memory, below PCIe 5's 55 GB/s",
        (hardware("h2d_bytes_per_s"),),
        log=True,
    ),
    Parameter(
        "d2d", "B/s", 200e9, 3000e9, 430e9, "gathers chunk by chunk, below half of HBM's 8 TB/s", (hardware("d2d_bytes_per_s"),), log=True
    ),
    Parameter("staging", "B/s", 5e9, 33e9, 10.4e9, "chunks beside serving: at most the link", (hardware("staging_bytes_per_s"),), log=True),
    Parameter("contention", "", 1.0, 2.0, 1.25, "a link shared by two streams", (hardware("contention_factor"),)),
    Parameter(
        "restore",
        "B/s",
        3e9,
        33e9,
        5.8e9,
        "scattered pages, layer by layer: at most the link",
        (hardware("restore_bytes_per_s"),),
        log=True,
    ),
    Parameter("switch_cv", "", 0.02, 0.3, 0.12, "spread of switches of one kind", (hardware("switch_cv"),), log=True),
)

_ERRORS = {"sct_p50_s": 0.15, "sct_p95_s": 0.2, "ttft_p50_s": 0.5, "ttft_p95_s": 0.2}
_WEIGHTS = {"sct_p50_s": 2.0, "talaria/ttft_p50_s": 0.3, "peak_hbm_gib": 0.0}


def _orders() -> tuple[Order, ...]:
    keys = [Experiment(REPLAY, config) for config in RISING]
    return (
        Order("sct_p50_s", keys[0], keys[1], 1.03),
        *(Order("sct_p50_s", low, high, 0.97) for low, high in pairwise(keys[1:])),
    )


TESTBED = Testbed(
    name="tp8",
    profile="paper-tp8",
    scenarios=(REPLAY,),
    parameters=PARAMETERS,
    fitted=published(("tp8", "switch"), _ERRORS, _WEIGHTS),
    orders=_orders(),
)
