"""Plans small enough for a test: a shipped scenario with fewer sessions."""

from __future__ import annotations

from talaria.sim import config, scenario
from talaria.sim.run import RunPlan, plan


def small_plan(scenario_name: str = "quickstart", config_name: str = "talaria", sessions: int = 4) -> RunPlan:
    loaded = scenario.load(scenario_name)
    fewer = loaded.model_copy(update={"workload": {**loaded.workload, "first_sessions": sessions}})
    return plan(fewer, config.get(config_name))
