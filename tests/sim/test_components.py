"""The switch component run: paths as asked for, one record a rank, phases that vary from switch to switch."""

from __future__ import annotations

import pytest

from talaria.profiles import load as load_profile
from talaria.sim import components
from talaria.sim.components import ASKED, simulate_components

SETTINGS = components.load().model_copy(update={"repeats": 4})
PROFILE = load_profile(SETTINGS.profile)
RANKS = PROFILE.hardware.tp
FOUND = simulate_components(SETTINGS, 0)


@pytest.mark.parametrize("path", ASKED)
def test_every_switch_takes_the_path_that_was_asked_for_and_leaves_a_record_of_each_rank(path: str) -> None:
    records = FOUND[path]
    assert len(records) == RANKS * 4 * len(SETTINGS.models) and {record.path for record in records} == {path}


@pytest.mark.parametrize("path", ASKED)
def test_ranks_of_a_switch_differ_in_their_copies_only(path: str) -> None:
    for first in range(0, len(FOUND[path]), RANKS):
        ranks = FOUND[path][first : first + RANKS]
        assert len({(record.phases_s[0], *record.phases_s[2:], record.d2d_bytes, record.h2d_bytes) for record in ranks}) == 1
        assert len({record.phases_s[1] for record in ranks}) == RANKS


def test_copied_bytes_are_the_weights_whatever_the_path() -> None:
    weights = {PROFILE.model(name).weight_bytes for name in SETTINGS.models}
    for records in FOUND.values():
        assert {record.d2d_bytes + record.h2d_bytes for record in records} == weights


def test_a_staged_model_costs_phase_1_its_stager_and_spares_phase_3_the_shell() -> None:
    def mean(path: str, phase: int) -> float:
        return sum(record.phases_s[phase] for record in FOUND[path]) / len(FOUND[path])

    assert mean("d2d", 0) > mean("h2d", 0) and mean("d2d", 2) < mean("h2d", 2)


def test_the_load_of_the_links_slows_only_what_comes_from_the_host() -> None:
    quiet = simulate_components(SETTINGS.model_copy(update={"link_load": 1.0}), 0)
    assert quiet["d2d"] == FOUND["d2d"]
    for calm, loaded in zip(quiet["h2d"], FOUND["h2d"], strict=True):
        assert loaded.phases_s[1] == pytest.approx(SETTINGS.link_load * calm.phases_s[1])


def test_one_seed_is_one_run() -> None:
    assert simulate_components(SETTINGS, 0) == FOUND != simulate_components(SETTINGS, 1)
