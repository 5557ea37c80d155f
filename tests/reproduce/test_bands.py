"""What holds of the published results as the simulator stands: orders and bands, over a few seeds. docs/fidelity.md lists what does not.

They are held to the bars themselves, on the ten draws that docs/fidelity.md reports and no fit has seen; runs repeat to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from talaria.report.statistics import estimate, sct_by_session, sessions_improved
from talaria.reproduce import targets
from talaria.reproduce.experiments import REPLAY, Experiment
from talaria.reproduce.measures import of_components, of_run
from talaria.reproduce.targets import ComponentSource, Target
from talaria.sim import components
from talaria.sim.compare import MECHANISMS
from talaria.sim.components import simulate_components
from talaria.sim.run import simulate

SEEDS = range(10_000, 10_010)


def means(key: Experiment, seeds: range) -> dict[str, float]:
    """Every measure that is defined, mean over ``seeds``."""
    plan = key.plan()
    found = [of_run(simulate(plan, seed)) for seed in seeds]
    spread = {name: estimate([values[name] for values in found]).mean for name in found[0]}
    return {name: mean for name, mean in spread.items() if mean is not None}


@pytest.fixture(scope="module")
def replay() -> Iterator[dict[str, dict[str, float]]]:
    """The TP=8 replay under the five configurations."""
    yield {config: means(Experiment(REPLAY, config), SEEDS) for config in MECHANISMS}


@pytest.fixture(scope="module")
def components_found() -> dict[str, float]:
    """The switch component run."""
    found = [of_components(simulate_components(components.load(), seed)) for seed in SEEDS]
    return {name: mean for name in found[0] if (mean := estimate([values[name] for values in found]).mean) is not None}


@pytest.mark.xdist_group("reproduce-bands")
def test_sct_is_in_the_published_order(replay: dict[str, dict[str, float]]) -> None:
    """Published: talaria 189 s, h2d-only 194, no-hkvr 486, no-sp 623, round-only 1000."""
    p50 = {config: values["sct_p50_s"] for config, values in replay.items()}
    assert p50["talaria"] <= 1.03 * p50["h2d-only"]
    assert p50["h2d-only"] < p50["no-hkvr"] < p50["no-sp"] < p50["round-only"]


@pytest.mark.xdist_group("reproduce-bands")
@pytest.mark.parametrize(
    ("config", "published_s"), [("talaria", 189), ("h2d-only", 194), ("no-hkvr", 486), ("no-sp", 623), ("round-only", 1000)]
)
def test_half_of_the_sessions_take_the_published_time(config: str, published_s: float, replay: dict[str, dict[str, float]]) -> None:
    """The bar, 15 %."""
    assert replay[config]["sct_p50_s"] == pytest.approx(published_s, rel=0.15)


@pytest.mark.xdist_group("reproduce-bands")
def test_tails_of_sct_are_near_the_published_ones(replay: dict[str, dict[str, float]]) -> None:
    """The bar, 20 %."""
    assert replay["talaria"]["sct_p95_s"] == pytest.approx(867, rel=0.20)
    assert replay["round-only"]["sct_p95_s"] == pytest.approx(2296, rel=0.20)


@pytest.mark.xdist_group("reproduce-bands")
@pytest.mark.parametrize(("name", "published", "bar"), [("sct_p50_s", 1000 / 189, 0.15), ("sct_p95_s", 2296 / 867, 0.20)])
def test_sessions_gain_the_published_factor(name: str, published: float, bar: float, replay: dict[str, dict[str, float]]) -> None:
    """Round-only over talaria, the bars."""
    assert replay["round-only"][name] / replay["talaria"][name] == pytest.approx(published, rel=bar)


@pytest.mark.xdist_group("reproduce-bands")
def test_rounds_switches_and_their_time_are_near_the_published_ones(replay: dict[str, dict[str, float]]) -> None:
    """Twice the bar of all errors at the median, 10 %; round-only's rounds are within it too."""
    for config, name, published in (
        ("talaria", "rounds", 200), ("talaria", "round_wall_s", 1632), ("talaria", "switch_s", 565), ("talaria", "switches", 600),
        ("h2d-only", "round_wall_s", 1753), ("h2d-only", "switch_s", 907), ("h2d-only", "switches", 600), ("round-only", "rounds", 339),
    ):  # fmt: skip
        assert replay[config][name] == pytest.approx(published, rel=0.20), (config, name)


@pytest.mark.xdist_group("reproduce-bands")
def test_nearly_every_session_is_faster_than_under_rounds_alone() -> None:
    """Published 29 of 30; bar 28."""
    talaria, rounds = (Experiment(REPLAY, config).plan() for config in ("talaria", "round-only"))
    assert sessions_improved(sct_by_session(simulate(talaria, 10_000)), sct_by_session(simulate(rounds, 10_000))) >= 28


@pytest.mark.xdist_group("reproduce-bands")
def test_switches_from_the_host_take_the_published_time(replay: dict[str, dict[str, float]]) -> None:
    """Published 1,497, 1,521 and 2,133 ms; hundreds of switches a seed leave an error of the mean below 1 %, the bar is 10 %."""
    for name, published_s in (("switch_p50_s", 1.497), ("switch_mean_s", 1.521), ("switch_p95_s", 2.133)):
        assert replay["h2d-only"][name] == pytest.approx(published_s, rel=0.1)


@pytest.mark.xdist_group("reproduce-bands")
def test_staging_makes_switches_shorter_by_the_published_third(replay: dict[str, dict[str, float]]) -> None:
    """Published mean 1,071 ms against 1,521, a ratio of 0.70; 10 % for the bar, 5 % for the draws."""
    assert replay["talaria"]["switch_mean_s"] / replay["h2d-only"]["switch_mean_s"] == pytest.approx(0.70, rel=0.15)


@pytest.mark.xdist_group("reproduce-bands")
@pytest.mark.parametrize("target", [target for _, target in targets.load().targets() if isinstance(target.by, ComponentSource)])
def test_the_component_run_is_near_the_published_table(target: Target, components_found: dict[str, float]) -> None:
    """The bar, 10 % at p50. A spread (p95) is held to 35 %, since one spread serves all paths."""
    assert isinstance(target.by, ComponentSource) and isinstance(target.value, int | float)
    bar = 0.10 if target.by.percent == 50 else 0.35
    assert 1e3 * components_found[target.by.measure] == pytest.approx(target.value, rel=bar)


@pytest.mark.xdist_group("reproduce-bands")
def test_the_memory_peak_is_the_published_one(replay: dict[str, dict[str, float]]) -> None:
    """177.1 GiB: the managed buffer and the residue of three opened models, the same in every draw."""
    assert replay["talaria"]["peak_hbm_gib"] == pytest.approx(177.1, rel=0.001)
