"""``talaria-sim profile``: list, show, fit and check hardware profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from talaria.cli.console import show_json, show_rows
from talaria.cli.options import JsonOption

app = typer.Typer(add_completion=False, help="Hardware profiles: list, show, fit to measured points, check.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A shipped profile, or the path of a profile file.")]


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """List the shipped profiles."""
    from talaria.profiles import load, names

    profiles = [load(name) for name in names()]
    rows = [
        {"name": profile.name, "gpu": profile.gpu, "tp": profile.hardware.tp, "models": list(profile.models), "hash": profile.hash}
        for profile in profiles
    ]
    if json:
        show_json({"schema": "talaria.profiles/1", "profiles": rows})
        return
    columns = ("profile", "gpu", "TP", "models", "hash")
    show_rows(columns, [[_text(cell) for cell in row.values()] for row in rows], wrapped=("gpu", "models"))


@app.command()
def show(name: NameArgument, json: JsonOption = False) -> None:
    """Show every number of a profile with its provenance and source."""
    from talaria.profiles import load

    profile = load(name)
    document = profile.file.document()
    if json:
        show_json({**document, "hash": profile.hash})
        return
    typer.echo(f"{profile.name} ({profile.gpu}, {profile.hash}): {profile.file.description}")
    tables = {"hardware": document["hardware"], **document["models"]}
    for title, quantities in tables.items():
        rows = [_quantity_row(field, quantity) for field, quantity in quantities.items()]
        show_rows(("field", "value", "provenance", "source"), rows, title=title, wrapped=("value", "source"))


@app.command()
def fit(
    points: Annotated[Path, typer.Argument(metavar="POINTS", help="Latency points: talaria.points/1, or aiconfigurator-core entries.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the profile.")],
    base: Annotated[str | None, typer.Option(help="Profile that gives what the points do not: hardware, sizes.")] = None,
    system: Annotated[str | None, typer.Option(help="Which system's entries, where the file has several.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw fitted against measured times and the residuals.")] = None,
    json: JsonOption = False,
) -> None:
    """Fit latency curves to measured points and write a complete profile."""
    from talaria.profiles.fit import fit_profile
    from talaria.profiles.points import read_points
    from talaria.report.files import write_atomically

    file, fits = fit_profile(read_points(points, system=system, base=base), where=str(points))
    if plot:
        from talaria.profiles.plot import draw_fits

        write_atomically(plot, draw_fits(fits, plot))
    write_atomically(out, file.text().encode())
    if json:
        reports = {name: {"prefill": fit.prefill.report(), "decode": fit.decode.report()} for name, fit in fits.items()}
        show_json({"schema": "talaria.fit/1", "profile": str(out), "plot": str(plot) if plot else None, "models": reports})
        return
    rows = [
        [name, curve, str(summary.points), f"{summary.median_error:.1%}", f"{summary.max_error:.1%}", summary.worst]
        for name, curves in file.fits.items()
        if name in fits
        for curve, summary in curves.items()
    ]
    columns = ("model", "curve", "points", "median error", "largest", "at")
    show_rows(columns, rows, title=f"{file.name} → {out}", wrapped=("model", "at"))


@app.command()
def check(name: NameArgument, json: JsonOption = False) -> None:
    """Look for numbers that contradict each other or physics, and for curves used beyond their points. Exit 1 on an error."""
    from dataclasses import asdict

    from talaria.profiles import load
    from talaria.profiles.check import check as findings_of

    profile = load(name)
    findings = findings_of(profile)
    errors = sum(finding.level == "error" for finding in findings)
    if json:
        show_json(
            {"schema": "talaria.profile-check/1", "profile": profile.name, "hash": profile.hash, "findings": [asdict(f) for f in findings]}
        )
    else:
        for finding in findings:
            typer.echo(f"{finding.level}: {finding.where} {finding.message}")
        typer.echo(f"{profile.name} ({profile.hash}): {errors} errors, {len(findings) - errors} warnings")
    if errors:
        raise typer.Exit(1)


def _quantity_row(field: str, quantity: Any) -> list[str]:
    if not isinstance(quantity, dict):
        return [field, str(quantity), "", ""]
    value = quantity["value"]
    return [field, f"{value:,}" if isinstance(value, int) else f"{value:g}", quantity["provenance"], quantity["source"]]


def _text(cell: Any) -> str:
    return ", ".join(cell) if isinstance(cell, list) else str(cell)
