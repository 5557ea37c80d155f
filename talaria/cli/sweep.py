"""``sweep``: what a knob trades, as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria.cli.options import Options, parse_knob, parse_names, parse_seeds, shared_options
from talaria.cli.studies import INTERRUPTED, StorageOption, kept_storage
from talaria.errors import InputError
from talaria.policy.knobs import BY_NAME

if TYPE_CHECKING:
    from talaria.tune.sweep import Axis

app = typer.Typer(add_completion=False)

PLOTS = Path("talaria-out")
"""Where a sweep's plot goes without --out."""

KnobArgument = Annotated[str, typer.Argument(metavar="KNOB[,KNOB]", help="One knob, or two for a grid; see `knobs`.")]
ValuesOption = Annotated[list[str] | None, typer.Option(metavar="V1,V2,...", help="Values to try; for two knobs give it twice, in order.")]
StudyOption = Annotated[str | None, typer.Option(metavar="NAME", help="The study's name; default: by what is swept.")]


@app.command()
@shared_options()
def sweep(
    options: Options, knob: KnobArgument, values: ValuesOption = None, storage: StorageOption = None, study: StudyOption = None
) -> None:
    """Sweep a knob, or a grid of two, and show what it trades.

    Without options: values of each knob's own; tau, gamma and nu on scenarios that respond to them, the others on quickstart; seeds 0
    to 9. The plot goes to ./talaria-out. With --out or --storage the points are kept as a study: the same command goes on where it
    stopped, and several processes share the points of one storage.
    """
    seeds = parse_seeds(options.seed, options.seeds, default=10)

    from talaria.cli.console import note, progress, show_document
    from talaria.cli.request import announce, request
    from talaria.report import tables
    from talaria.sim.interrupts import deferred
    from talaria.sim.parallel import Pool
    from talaria.tune import sweep as sweeping
    from talaria.tune.storage import IN_MEMORY, beginning, sqlite_url

    axes = parse_axes(knob, values)
    asked = request(options, default_scenario=sweeping.default_scenario(axes))
    for axis in axes:
        if axis.knob in asked.knobs:
            raise InputError(f"{axis.knob} is swept and also set to {asked.knobs[axis.knob]}", where="--set", fix="leave one of them out")
    cases = sweeping.cases(axes, lambda knobs: asked.plan(knobs=knobs), options.out)
    url = storage if storage is not None else sqlite_url(options.out / "study.db") if options.out else IN_MEMORY
    with kept_storage(url) as kept:
        with beginning(url):
            chosen = sweeping.Sweep(axes, cases, seeds, kept, study, decisions=options.decisions, timeline=options.timeline)
        runs, total = chosen.runs_left(), len(cases) * len(seeds)
        announce(cases[0].plan)
        if runs < total:
            note(f"study {chosen.studied.design.name} has {(total - runs) // len(seeds)} of {len(cases)} points already")
        with Pool(runs) as pool, progress("simulating", runs) as advance:
            code = 0 if chosen.run(pool, advance) else INTERRUPTED
        for warning in chosen.warnings:
            note(warning)
        with deferred():
            document = sweeping.finish(chosen, options.out or PLOTS, options.out)
    if code:
        note(f"interrupted after {len(document['points']) if document else 0} of {len(cases)} points")
    elif missing := len(cases) - (len(document["points"]) if document else 0):
        note(f"{missing} of {len(cases)} points are missing: each process that ran them died; give another --study to try again")
        code = 1
    if document:
        note(f"plot: {document['plot']}")
        if len(document["points"]) > 1 and not _moved(document["points"], tables.SWEPT):
            note(f"{knob} changes nothing of this on {document['scenario']}: try another --scenario or --config, or other --values")
        show_document(document, tables.sweep_table, as_json=options.json)
    raise typer.Exit(code)


def parse_axes(knob: str, values: Sequence[str] | None) -> list[Axis]:
    """The swept knobs with their values: the given ones, or the knob's own. Raises InputError."""
    from talaria.tune.sweep import Axis

    names = parse_names(knob, list(BY_NAME), kind="knob", where="KNOB")
    if len(names) > 2:
        raise InputError(f"{knob!r} names {len(names)} knobs", where="KNOB", allowed="one, or two for a grid")
    if values is None:
        return [Axis(name, BY_NAME[name].sweep) for name in names]
    if len(values) != len(names):
        raise InputError(f"given {len(values)} times for {knob!r}", where="--values", allowed="once per knob, in the same order")
    return [Axis(name, _values(name, text)) for name, text in zip(names, values, strict=True)]


def _moved(points: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> bool:
    """Whether any of ``metrics`` differs between two points."""
    return any(len({point["metrics"][name] for point in points}) > 1 for name in metrics)


def _values(name: str, text: str) -> tuple[object, ...]:
    found = tuple(parse_knob(name, part.strip(), "--values") for part in text.split(",") if part.strip())
    if not found:
        raise InputError(f"{text!r} holds no value", where="--values", allowed=BY_NAME[name].allowed)
    if len(set(found)) < len(found):
        raise InputError(f"{text!r} holds a value twice", where="--values", allowed="each value once")
    return found
