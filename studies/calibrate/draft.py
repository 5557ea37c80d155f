"""A testbed under trial: its profile and scenarios as plain documents, in which parameters put their values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from talaria.reproduce.experiments import Experiment
from talaria.sim import components
from talaria.sim import config as configs
from talaria.sim import scenario as scenarios
from talaria.sim.run import RunPlan, plan
from talaria.substrate.switch import SwitchRecord
from talaria.validation import parse
from talaria.yamlfile import read_mapping

SCENARIOS = Path(scenarios.__file__).parent / "scenarios"
DIGITS = 4
"""Significant digits of a fitted value: more would pretend to a precision that no fit has."""


class Draft:
    """Documents of one profile, some scenarios and the component run. ``source`` is what a fitted quantity is said to come from."""

    def __init__(self, profile: dict[str, Any], scenario_names: Iterable[str], source: str) -> None:
        self.profile = copy.deepcopy(profile)
        self.scenarios = {name: read_mapping(SCENARIOS / f"{name}.yaml", ()) for name in scenario_names}
        self.components = read_mapping(components.FILE, ())
        """The switch component run."""
        self._source = source

    def copy(self) -> Draft:
        return copy.deepcopy(self)

    def set_quantity(self, table: dict[str, Any], field: str, value: float, what: str = "") -> None:
        """Put a number of the profile, as fitted; one that counts (bytes, tokens) stays whole. ``what``: what it was made of."""
        before = table.get(field, {}).get("value")
        whole = isinstance(before, int)
        source = f"{what}; {self._source}" if what else self._source
        table[field] = {"value": round(value) if whole else rounded(value), "provenance": "fitted", "source": source}

    def plans(self, experiments: Iterable[Experiment]) -> dict[Experiment, RunPlan]:
        """The experiments as this draft has them. Raises InputError where they are impossible."""
        with self._profile_file() as path:
            made = {}
            for key in experiments:
                raw = self.scenarios[key.scenario]
                scenario = parse(scenarios.Scenario, {**raw, "profile": path}, key.scenario)
                made[key] = plan(scenario, configs.get(key.config), knobs=None if key.tau is None else {"tau": key.tau})
            return made

    def component_records(self, seed: int) -> dict[str, list[SwitchRecord]]:
        """The switch component run as this draft has it."""
        with self._profile_file() as path:
            settings = parse(components.ComponentRun, {**self.components, "profile": path}, "component run")
            return components.simulate_components(settings, seed)

    @contextmanager
    def _profile_file(self) -> Iterator[str]:
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.profile['name']}.json"
            path.write_text(json.dumps(self.profile), encoding="utf-8")
            yield str(path)


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
