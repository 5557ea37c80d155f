"""A testbed under trial: its profile and scenarios as plain documents, in which parameters put their values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from talaria.profiles.load import DATA, read_json
from talaria.reproduce.experiments import Experiment
from talaria.sim import config as configs
from talaria.sim import scenario as scenarios
from talaria.sim.run import RunPlan, plan
from talaria.validation import parse
from talaria.yamlfile import read_mapping

SCENARIOS = Path(scenarios.__file__).parent / "scenarios"
DIGITS = 4
"""Significant digits of a fitted value: more would pretend to a precision that no fit has."""


class Draft:
    """Documents of one profile and some scenarios. ``source`` is what a fitted quantity is said to come from."""

    def __init__(self, profile: str, scenario_names: Iterable[str], source: str) -> None:
        self.profile: dict[str, Any] = read_json(DATA / f"{profile}.json")
        self.scenarios = {name: read_mapping(SCENARIOS / f"{name}.yaml", ()) for name in scenario_names}
        self._source = source

    def copy(self) -> Draft:
        return copy.deepcopy(self)

    def set_quantity(self, table: Mapping[str, Any], field: str, value: float) -> None:
        """Put a number of the profile, as fitted; one that counts (bytes, tokens) stays whole."""
        before = table[field]["value"]
        table[field].update(value=round(value) if isinstance(before, int) else rounded(value), provenance="fitted", source=self._source)

    def plans(self, experiments: Iterable[Experiment]) -> dict[Experiment, RunPlan]:
        """The experiments as this draft has them. Raises InputError where they are impossible."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.profile['name']}.json"
            path.write_text(json.dumps(self.profile), encoding="utf-8")
            made = {}
            for key in experiments:
                raw = self.scenarios[key.scenario]
                scenario = parse(scenarios.Scenario, {**raw, "profile": str(path)}, key.scenario)
                made[key] = plan(scenario, configs.get(key.config), knobs=None if key.tau is None else {"tau": key.tau})
            return made


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
