"""``report``: looks at a run directory again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from talaria.cli.options import JsonOption

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, of the simulator or of hardware.")]

app = typer.Typer(add_completion=False)


@app.command()
def report(directory: DirectoryArgument, json: JsonOption = False) -> None:
    """Show a run directory's numbers and write its report.html anew."""
    from talaria.cli.console import note, show_document
    from talaria.report import tables
    from talaria.report.files import rebuild_report
    from talaria.report.schema import read_run_document

    note(f"report: {rebuild_report(directory)}")
    show_document(read_run_document(directory / "run.json"), tables.run_table, as_json=json)
