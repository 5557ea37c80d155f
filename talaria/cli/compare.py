"""``compare``: several configurations under the same work and the same random numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from talaria.cli.options import Options, parse_names, parse_seeds, shared_options
from talaria.errors import InputError

app = typer.Typer(add_completion=False)

ConfigsOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Configurations, the first being the base; see `configs`.")]


@app.command()
@shared_options("config")
def compare(options: Options, configs: ConfigsOption = None) -> None:
    """Compare configurations: paired differences with 95 % confidence intervals.

    Without options: talaria and its four ablations on quickstart, seeds 0 to 9.
    """
    seeds = parse_seeds(options.seed, options.seeds, default=10)

    from talaria.cli.collect import collect, peak_rss_mib
    from talaria.cli.console import note, show_document
    from talaria.cli.request import announce, request
    from talaria.report import tables
    from talaria.report.comparison import write as write_comparison
    from talaria.sim import compare as comparison
    from talaria.sim.batch import Batch
    from talaria.sim.config import CONFIGS
    from talaria.sim.interrupts import deferred

    names = comparison.MECHANISMS if configs is None else parse_names(configs, list(CONFIGS), kind="config", where="--configs")
    if len(names) < 2:
        raise InputError(f"{configs!r} leaves nothing to compare", where="--configs", allowed="two or more configurations")
    asked = request(options, default_scenario="quickstart")
    cases = comparison.cases(names, lambda config: asked.plan(config=config), options.out)
    with Batch(cases, seeds, by_seed=True, decisions=options.decisions, timeline=options.timeline) as batch:
        announce(cases[0].plan)
        routers = {case.plan.config.router for case in cases}
        if len(cases[0].plan.instances) == 1 and len(routers) > 1:
            note(f"scenario {asked.scenario.name} has one instance, which every router chooses: only how returns are admitted differs")
        code = collect(batch)
        with deferred():
            runs = batch.finish(peak_rss_mib())
            if runs:
                document = comparison.document(batch, runs)
                if options.out:
                    write_comparison(options.out, document, batch.records)
                show_document(document, tables.compare_table, as_json=options.json)
    raise typer.Exit(code)
