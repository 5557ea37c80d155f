"""``scenarios``, ``configs`` and ``knobs``: the names that the other commands take, with what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer

from talaria.cli.console import show_json, show_rows
from talaria.cli.options import JsonOption
from talaria.policy.knobs import KNOBS, Knob, value_text

app = typer.Typer(add_completion=False)


@app.command()
def scenarios(json: JsonOption = False) -> None:
    """List what can be simulated: instances, models, workload. --json adds what was inferred rather than published."""
    from talaria.sim import scenario

    loaded = {name: scenario.load(name) for name in scenario.names()}
    _show([{"scenario": name, "description": item.about, "notes": item.notes} for name, item in loaded.items()], json)


@app.command()
def configs(json: JsonOption = False) -> None:
    """List the configurations: router, slot scheduler and substrate switches."""
    from talaria.sim.config import CONFIGS

    rows = [{"config": name, "router": config.router, "description": config.description} for name, config in CONFIGS.items()]
    _show(rows, json)


@app.command()
def knobs(json: JsonOption = False) -> None:
    """List every tunable with its unit, default and bounds; set one with --set NAME=VALUE."""
    rows = [
        {
            "knob": knob.name,
            "default": knob.default,
            "unit": knob.unit,
            "allowed": knob.bounds,
            "meaning": knob.meaning,
            "source": knob.source,
        }
        for knob in KNOBS
    ]
    _show(rows, json)


def knobs_markdown(knobs: Iterable[Knob] = KNOBS) -> str:
    """The text of ``docs/knobs.md``."""
    lines = [
        "# Knobs",
        "",
        "Every tunable of the policies, written from `talaria/policy/knobs.py` by `python -m talaria.cli.listing > docs/knobs.md`.",
        "Set one with `--set NAME=VALUE`; `talaria-sim sweep NAME` shows what it trades. `--set` wins over a `--policy` file,",
        "and that over the scenario. A policy file is YAML or JSON:",
        "",
        "```yaml",
        "schema: talaria.policy/1",
        "config: talaria          # may be left out; --config wins",
        "knobs: {tau: 2, nu: 20}",
        "```",
        "",
        "| knob | default | unit | allowed | meaning | source | sweep |",
        "|---|---|---|---|---|---|---|",
    ]
    for knob in knobs:
        default, swept = value_text(knob.default), ", ".join(map(value_text, knob.sweep))
        cells = (f"`{knob.name}`", default, knob.unit, knob.bounds, knob.meaning, knob.source, swept)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        show_json(rows)
        return
    columns = [name for name in rows[0] if name not in ("source", "notes")]
    show_rows(columns, [[value_text(row[name]) for name in columns] for row in rows], wrapped=("description", "meaning"))


if __name__ == "__main__":
    print(knobs_markdown(), end="")
