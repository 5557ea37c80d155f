"""``replay-decisions``: proves that a log's decisions are the ones this version of the policy makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from talaria.cli.console import note, progress

LogArgument = Annotated[Path, typer.Argument(metavar="LOG", help="A decisions.jsonl, of the simulator or of hardware.")]

app = typer.Typer(add_completion=False)


@app.command("replay-decisions")
def replay_decisions(log: LogArgument) -> None:
    """Feed a decision log's inputs through the policy again; exit 1 if any decision differs."""
    from talaria.report.replay import replay

    with progress("replaying", None) as advance:
        found = replay(log, advance)
    note(f"{found.decisions} decisions replayed")
    print(f"{found.count} difference{'s' if found.count != 1 else ''}")
    for difference in found.first:
        print(f"line {difference.line}, {difference.now_s:.6f} s, {difference.who}")
        print(f"  logged   {difference.logged}\n  replayed {difference.replayed}")
    raise typer.Exit(1 if found.count else 0)
