"""``validate``: how far a simulation was off a real run of the same trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from talaria.cli.console import note, progress, show_json, show_rows
from talaria.cli.options import JsonOption

app = typer.Typer(add_completion=False)

SimArgument = Annotated[Path, typer.Argument(metavar="SIM_RUN", help="A run directory of `talaria-sim run --out`.")]
GpuArgument = Annotated[Path, typer.Argument(metavar="GPU_RUN", help="A run directory of `talaria-gpu run --out`.")]
OutOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Also write validation.json, calls.parquet and a figure there.")]


@app.command()
def validate(sim_run: SimArgument, gpu_run: GpuArgument, out: OutOption = None, json: JsonOption = False) -> None:
    """Compare a simulation with a real run of the same trace, and replay the real run's decisions.

    Exit 1 if the median session completion time is outside the bar, or a decision differs.
    """
    from talaria.gpu.validation.compare import validate as compare
    from talaria.gpu.validation.compare import write

    with progress("replaying decisions", None) as advance:
        validation = compare(sim_run, gpu_run, advance)
    if out is not None:
        write(validation, out)
        note(f"written: {out}")
    if json:
        show_json(validation.document)
    else:
        _show(validation.document)
    raise typer.Exit(0 if validation.passed else 1)


def _show(document: dict[str, Any]) -> None:
    from talaria.report.tables import number

    rows = [
        [row["metric"], *_numbers(row, "simulated", "measured", "spread", "error"), _share(row["error_share"])]
        for row in document["metrics"]
        if row["simulated"] is not None or row["measured"] is not None
    ]
    show_rows(("metric", "simulated", "measured", "spread", "error", "share"), rows, title="metrics: medians over repetitions")
    calls = document["calls"]
    found = {"SCT per session": document["sessions"], "TTFT per call": calls["ttft_s"], "time per call": calls["e2e_s"]}
    rows = [
        [what, str(errors["count"]), *_numbers(errors, "bias_s", "mae_s", "p95_s"), _share(errors["mae_share"]), str(errors["unmatched"])]
        for what, errors in found.items()
    ]
    show_rows(("error, s", "compared", "mean", "mean absolute", "p95", "share", "in one run only"), rows, title="one by one")
    rows = [
        [name, *_numbers(term, "predicted_mean_s", "happened_mean_s", "bias_s", "mae_s"), str(term["worst_of"])]
        for name, term in document["terms"].items()
    ]
    show_rows(("term of Eq. 1, s", "predicted", "happened", "bias", "mean absolute", "furthest off in calls"), rows)
    if (mix := document["switches"]) is not None:
        rows = [[path, *(f"{mix[which][path]:.1%}" for which in ("simulated", "measured"))] for path in mix["measured"]]
        show_rows(("switches by path", "simulated", "measured"), rows, title=f"{mix['difference']:.1%} of switches differ")
    decisions, bar = document["decisions"], document["bar"]
    typer.echo(f"{decisions['count']} decisions replayed, {decisions['differences']} differences")
    verdict = "within" if bar["passed"] else "NOT within"
    typer.echo(f"{bar['metric']}: off by {number(bar['error'])} s, {verdict} the allowed {number(bar['allowed_error'])} s")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _numbers(row: dict[str, Any], *names: str) -> list[str]:
    from talaria.report.tables import number

    return [number(row[name]) for name in names]
