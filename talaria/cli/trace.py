"""``talaria-sim trace``: import recorded traces, validate and describe trace files, generate synthetic ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from talaria.cli.console import note, progress, show_json
from talaria.cli.options import JsonOption
from talaria.errors import InputError

if TYPE_CHECKING:
    from talaria.workload.importers.report import ImportReport
    from talaria.workload.session import Session

app = typer.Typer(add_completion=False, help="Traces: import recorded ones, validate, describe, generate.")

OutOption = Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Trace file to write; gzip if it ends in .gz.")]


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recorded trace, plain or gzip.")],
    out: OutOption,
    format: Annotated[str | None, typer.Option(metavar="F", help="Its format; told from the content where that is unambiguous.")] = None,
    dedup: Annotated[bool, typer.Option("--dedup", help="Drop sessions whose prompts and outputs repeat an earlier session's.")] = False,
) -> None:
    """Convert a recorded trace to talaria.trace/1; says on stderr what was merged, skipped or estimated."""
    report = _import(file, out, format, dedup)
    for line in [f"{out}: {report.lines()[0]}", *report.lines()[1:]]:
        note(line)


@app.command()
def validate(file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace file (talaria.trace/1).")]) -> None:
    """Check every line of a trace file."""
    from talaria.workload.importers.report import counted
    from talaria.workload.trace import TraceFile

    trace = TraceFile(file)
    sessions = calls = 0
    with progress("checking", None) as advance:
        for session in trace.sessions():
            sessions, calls = sessions + 1, calls + len(session.calls)
            advance()
    typer.echo(f"{file}: valid, {counted(sessions, 'session')}, {counted(calls, 'call')}, models {', '.join(trace.models())}")


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace of any format that is told from its content.")],
    json: JsonOption = False,
) -> None:
    """Describe a trace: sizes, depths, gaps, prompts, reuse, beside the published regime."""
    import tempfile

    from talaria.workload.importers import detect
    from talaria.workload.stats import regime, render
    from talaria.workload.trace import TraceFile

    format_name = detect(file).name
    with tempfile.TemporaryDirectory(prefix="talaria-") as folder:
        if format_name == "talaria":
            trace = TraceFile(file)
        else:
            report = _import(file, Path(folder, "imported.jsonl"), format_name, dedup=False)
            trace = TraceFile(Path(folder, "imported.jsonl"))
            for line in [f"read as {format_name}: {report.lines()[0]}", *report.lines()[1:]]:
                note(line)
        with progress("measuring", 1) as advance:
            table = regime(trace)
            advance()
    estimated = list(trace.header.estimated)
    if json:
        show_json({"schema": "talaria.trace-stats/1", "trace": trace.name, "estimated": estimated, **table})
        return
    typer.echo(render(table))
    if estimated:
        typer.echo(f"estimated, not recorded: {', '.join(estimated)}")


@app.command()
def generate(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Workload recipe, such as corpus or replay960.")],
    out: OutOption,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the draw.")] = 0,
    sessions: Annotated[int | None, typer.Option(metavar="N", help="Sessions to draw instead of the preset's own number.")] = None,
) -> None:
    """Draw a synthetic trace from a workload recipe."""
    from talaria.workload import generate as generator
    from talaria.workload.importers.report import counted
    from talaria.workload.rules import TraceHeader
    from talaria.workload.trace import write_trace

    if seed < 0:
        raise InputError(f"{seed} is negative", where="--seed", allowed="0 and up")
    workload = generator.preset(preset, seed, **({} if sessions is None else {"sessions": sessions}))
    header = TraceHeader(
        f"{preset}-seed{seed}", workload.block_tokens, workload.block_scope, source=f"generated from {preset}, seed {seed}"
    )
    with progress("drawing", workload.recipe.sessions) as advance:
        header = write_trace(out, header, _each(workload.sessions(), advance))
    note(f"{out}: {counted(workload.recipe.sessions, 'session')}, {counted(sum(header.models.values()), 'call')}")


def _each(sessions: Iterator[Session], advance: Callable[[], None]) -> Iterator[Session]:
    for session in sessions:
        advance()
        yield session


def _import(file: Path, out: Path, format_name: str | None, dedup: bool) -> ImportReport:
    from talaria.workload.importers import import_trace
    from talaria.workload.importers.report import ImportReport

    report = ImportReport()
    with progress("importing", None) as advance:
        import_trace(file, out, report, format_name=format_name, dedup=dedup, on_session=advance)
    return report
