"""``run``: one scenario under one configuration."""

from __future__ import annotations

import typer

from talaria.cli.options import Options, parse_seeds, shared_options

app = typer.Typer(add_completion=False)


@app.command()
@shared_options()
def run(options: Options) -> None:
    """Simulate one scenario under one configuration: what its sessions and calls experience.

    Without options: the scenario quickstart under the configuration talaria, seed 0.
    """
    seeds = parse_seeds(options.seed, options.seeds, default=1)

    from talaria.cli.collect import collect, peak_rss_mib
    from talaria.cli.console import show_document
    from talaria.cli.request import announce, request
    from talaria.report import tables
    from talaria.sim.batch import Batch, Case
    from talaria.sim.interrupts import deferred

    asked = request(options, default_scenario="quickstart")
    plan = asked.plan()
    case = Case(plan.config.name, plan, options.out)
    with Batch([case], seeds, by_seed=True, decisions=options.decisions, timeline=options.timeline) as batch:
        announce(plan)
        code = collect(batch)
        with deferred():
            for document in batch.finish(peak_rss_mib()).values():
                show_document(document, tables.run_table, as_json=options.json)
    raise typer.Exit(code)
