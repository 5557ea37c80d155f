"""``reproduce``: the published experiments beside the simulator's answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from talaria.cli.options import JsonOption, parse_seeds

if TYPE_CHECKING:
    from talaria.reproduce.experiments import Campaign

app = typer.Typer(add_completion=False)

SeedsOption = Annotated[str | None, typer.Option(metavar="N|A:B", help="Seeds 0..N-1, or A..B-1; 10 by default.")]
OutOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write reproduce.json and report.html, with the figures, to DIR.")]


@app.command()
def reproduce(seeds: SeedsOption = None, out: OutOption = None, json: JsonOption = False) -> None:
    """Every published number beside the simulator's, with spread, error and where the published ones disagree.

    Without options: seeds 0 to 9. The bars that a reproduction is held to follow, met or missed.
    """
    chosen = parse_seeds(None, seeds, default=10)

    from contextlib import ExitStack

    from talaria.cli.collect import peak_rss_mib
    from talaria.cli.console import note, show_document
    from talaria.report.document import for_file
    from talaria.report.files import StagedDirectory
    from talaria.reproduce import targets
    from talaria.reproduce.document import reproduce_document
    from talaria.reproduce.experiments import Campaign
    from talaria.reproduce.table import reproduce_table
    from talaria.sim.interrupts import deferred

    with ExitStack() as stack:
        directory = stack.enter_context(StagedDirectory(out)) if out is not None else None
        campaign = Campaign(chosen, keep=directory is not None)
        code = _collect(campaign)
        with deferred():
            if campaign.finished_seeds:
                found = campaign.findings()
                for warning in found.warnings:
                    note(warning)
                document = reproduce_document(targets.load(), found, campaign.host(peak_rss_mib()))
                if directory is not None:
                    from talaria.reproduce.page import write

                    write(directory.staging, for_file(document), found)
                    directory.commit()
                show_document(document, reproduce_table, as_json=json)
    raise typer.Exit(code)


def _collect(campaign: Campaign) -> int:
    """Run the campaign's jobs under a progress bar; the exit code: 0, or 130 if interrupted."""
    from talaria.cli.collect import INTERRUPTED
    from talaria.cli.console import note, progress

    steps = campaign.run()
    with progress("simulating", len(campaign.jobs)) as advance:
        try:
            for _ in steps:
                advance()
        except KeyboardInterrupt:
            steps.close()
            note(f"interrupted after {campaign.finished_seeds} of {campaign.seeds_asked} seeds")
            return INTERRUPTED
    return 0
