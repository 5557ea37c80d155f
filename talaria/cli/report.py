"""``report``: looks at a run directory again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from talaria.cli.options import JsonOption

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, of the simulator or of hardware.")]

CallOption = Annotated[
    str | None,
    typer.Option("--call", metavar="SESSION[:TURN]", help="Say why the session's calls went where they went (a run with --decisions)."),
]

app = typer.Typer(add_completion=False)


@app.command()
def report(directory: DirectoryArgument, call: CallOption = None, json: JsonOption = False) -> None:
    """Show a run directory's numbers and write its report.html anew, or explain the placement of calls."""
    if call is not None:
        _explain(directory, call, as_json=json)
        return
    from talaria.cli.console import note, progress, show_document
    from talaria.report import tables
    from talaria.report.files import rebuild_report
    from talaria.report.schema import read_run_document

    with progress("drawing the report", 1) as advance:
        path = rebuild_report(directory)
        advance()
    note(f"report: {path}")
    show_document(read_run_document(directory / "run.json"), tables.run_table, as_json=json)


def _explain(directory: Path, wanted: str, *, as_json: bool) -> None:
    from talaria.cli.console import show_json
    from talaria.errors import InputError
    from talaria.report.placements import placements

    log = directory / "decisions.jsonl"
    if not log.exists():
        raise InputError("has no decisions.jsonl", where=str(directory), fix="run again with --out DIR --decisions")
    session, colon, turn = wanted.rpartition(":")
    if not colon or not turn.isdecimal():
        session, turn = wanted, ""
    found = placements(log, session, int(turn) if turn else None)
    if as_json:
        rows = [
            {"session": call.key.session, "line": call.key.line, "turn": call.turn, "prompt_tokens": call.prompt_tokens,
             "reusable_tokens": call.reusable_tokens, **explanation.as_dict()}
            for call, explanation in found
        ]  # fmt: skip
        show_json({"schema": "talaria.placements/1", "placements": rows})
        return
    for call, explanation in found:
        where = f"{call.key.session} line {call.key.line} turn {call.turn}"
        typer.echo(f"{where}: {call.prompt_tokens:,} prompt tokens, {call.reusable_tokens:,} reusable")
        typer.echo(explanation.text())
