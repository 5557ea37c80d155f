"""``doctor``: would this cluster run here?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from talaria.cli.console import show_json
from talaria.cli.options import JsonOption

app = typer.Typer(add_completion=False)

ClusterArgument = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster file.")]


@app.command()
def doctor(cluster: ClusterArgument, json: JsonOption = False) -> None:
    """Check a cluster file against this machine: what would fail, and how to mend it. Exit 1 if something would."""
    from talaria.gpu import config
    from talaria.gpu.doctor.checks import Machine, examine
    from talaria.gpu.doctor.engine import ask
    from talaria.gpu.doctor.machine import gpus, memory_bytes, open_files

    loaded = config.load(cluster)
    findings = examine(loaded, Machine(gpus(), memory_bytes(), open_files(), ask(loaded.engine)))
    failed = any(finding.level == "fail" for finding in findings)
    if json:
        rows = [asdict(finding) for finding in findings]
        show_json({"schema": "talaria.doctor/1", "cluster": loaded.name, "passed": not failed, "findings": rows})
    else:
        for finding in findings:
            typer.echo(f"{finding.level:4}  {finding.check}: {finding.what}" + (f"; {finding.fix}" if finding.fix else ""))
    raise typer.Exit(1 if failed else 0)
