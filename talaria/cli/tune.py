"""``tune``: a search over knobs that ends in a policy file, with what it gains on draws that the search has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from talaria.cli.options import Options, parse_assignments, parse_seeds, shared_options
from talaria.cli.studies import INTERRUPTED, StorageOption, kept_storage
from talaria.errors import InputError

if TYPE_CHECKING:
    from talaria.tune.task import Task

app = typer.Typer(add_completion=False)

PLACE = Path("talaria-out/tune")
SCENARIOS = "paper-tp8,paper-tp4-high,four-by-five"
KNOBS = "tau,gamma,nu"
DRAWS, VALIDATION = 3, "10000:10010"

KnobsOption = Annotated[str, typer.Option(metavar="KNOB[=LOW:HIGH],...", help="What is varied: see `knobs`; also instances=LOW:HIGH.")]
ObjectiveOption = Annotated[str, typer.Option(metavar="METRIC,...", help="What is to improve, or cost: the number of instances.")]
ConstraintOption = Annotated[list[str] | None, typer.Option(metavar="METRIC<=X", help="Must hold in every scenario; calls_shed==0 does.")]
TrialsOption = Annotated[int, typer.Option(min=1, max=1_000_000, metavar="N", help="Trials of the study, those of earlier runs counted.")]
StudyOption = Annotated[str, typer.Option(metavar="NAME", help="The study's name in its storage.")]
JobsOption = Annotated[int | None, typer.Option(min=1, max=1024, metavar="N", help="Processes on this machine; default: one a core.")]
OutOption = Annotated[Path, typer.Option(metavar="DIR", help="Where policy.yaml and the report go.")]
ScenarioOption = Annotated[str, typer.Option(metavar="NAME|FILE,...", help="What is simulated in every trial: see `scenarios`.")]
ValidationOption = Annotated[str, typer.Option(metavar="A:B", help="Draws on which the result is compared with the baseline.")]
SamplerOption = Annotated[str | None, typer.Option(metavar="tpe|cmaes|nsga2", help="Default: tpe; nsga2 with several objectives.")]
SeedOption = Annotated[int, typer.Option(min=0, max=1_000_000, metavar="N", help="Seed of the search.")]


@app.command()
@shared_options("scenario", "seed", "out", "decisions", "timeline")
def tune(
    options: Options, knobs: KnobsOption = KNOBS, objective: ObjectiveOption = "sct_p95_s", constraint: ConstraintOption = None,
    trials: TrialsOption = 100, storage: StorageOption = None, study: StudyOption = "tune", jobs: JobsOption = None,
    out: OutOption = PLACE, scenario: ScenarioOption = SCENARIOS, validation: ValidationOption = VALIDATION,
    sampler: SamplerOption = None, seed: SeedOption = 0,
) -> None:  # fmt: skip
    """Search for better knobs and write them as policy.yaml, with their gain on unseen draws.

    Without options: tau, gamma and nu on paper-tp8, paper-tp4-high and four-by-five, 100 trials, into ./talaria-out/tune. The same
    command continues a study; on several hosts with one --storage, they share it.
    """
    draws, unseen = parse_seeds(None, options.seeds, default=DRAWS), parse_seeds(None, validation, default=0, where="--validation")
    if shared := range(max(draws.start, unseen.start), min(draws.stop, unseen.stop)):
        raise InputError(f"{validation!r} holds draw {shared[0]} of the search", where="--validation", allowed="draws that it has not")
    if not study.strip():
        raise InputError(f"{study!r} names no study", where="--study", allowed="a name")

    from talaria.cli.console import note, progress, show_document
    from talaria.report.files import check_writable
    from talaria.sim.parallel import Pool
    from talaria.tune import output, report
    from talaria.tune.beats import Pulse
    from talaria.tune.search import Search
    from talaria.tune.storage import beginning, redacted, sqlite_url

    task = parse_task(scenario, options, knobs, objective, constraint or [], draws)
    chosen = parse_sampler(sampler, task)
    check_writable(out / "policy.yaml")
    url = storage if storage is not None else sqlite_url(out / "study.db")
    with kept_storage(url) as kept:
        with beginning(url):
            search = Search(task, kept, study, trials, sampler=chosen, seed=seed, pulse=Pulse())
        for item in task.scenarios:
            note(f"scenario {item.name}: {item.about}")
        note(report.baseline_line(task))
        left = max(trials - len(search.studied.finished()), 0)
        with Pool((left * len(draws) + 2 * len(unseen)) * len(task.scenarios), jobs) as pool:
            try:
                with progress("tuning", trials) as advance:
                    search.run(pool, lambda finished: advance(report.headline(task, finished), len(finished)))
                document = output.finish(task, search.studied.finished(), unseen, pool, out, study=study, storage=redacted(url))
            except KeyboardInterrupt:
                note(f"interrupted: {len(search.studied.finished())} of {trials} trials are kept; the same command goes on")
                raise typer.Exit(INTERRUPTED) from None
    for line in report.remarks(document):
        note(line)
    show_document(document, report.tune_table, as_json=options.json)


def parse_task(scenario: str, common: Options, knobs: str, objective: str, constraints: Sequence[str], draws: Sequence[int]) -> Task:
    """What is tuned, checked and planned. Raises InputError before anything runs."""
    from talaria.cli.request import request
    from talaria.tune.goals import parse_constraints, parse_objectives
    from talaria.tune.space import parse_space
    from talaria.tune.task import Task

    names = [name.strip() for name in scenario.split(",") if name.strip()]
    if not names:
        raise InputError(f"{scenario!r} names no scenario", where="--scenario", allowed="names or files, separated by commas")
    asked = [request(replace(common, scenario=name), default_scenario=name) for name in names]
    scenarios = tuple(item.scenario for item in asked)
    for index, item in enumerate(scenarios):
        if item.name in [other.name for other in scenarios[:index]]:
            raise InputError(f"scenario {item.name!r} is given twice", where="--scenario", allowed="each name once")
    space, fixed = parse_space(knobs), parse_assignments(common.set or (), "--set", "KNOB=VALUE", "linger=1")
    for name in (item.name for item in space):
        if name in fixed:
            raise InputError(f"{name} is varied and also set to {fixed[name]}", where="--set", fix="leave one of them out")
    task = Task(
        scenarios, asked[0].config, space, parse_objectives(objective), parse_constraints(constraints), tuple(draws), asked[0].knobs,
        asked[0].trace,
    ).begun()  # fmt: skip
    _check_cost(task)
    task.plans()
    return task


def _check_cost(task: Task) -> None:
    from talaria.tune.goals import COST
    from talaria.tune.space import INSTANCES

    if COST in [goal.name for goal in task.objectives] and INSTANCES not in task.first:
        raise InputError("cost is the same in every trial", where="--objective", fix="vary it: add instances=1:8 to --knobs")


def parse_sampler(sampler: str | None, task: Task) -> str:
    """The sampler's name, checked against the number of objectives."""
    from talaria.errors import unknown_name
    from talaria.tune.samplers import NSGA2, SAMPLERS, TPE

    several = len(task.objectives) > 1
    if sampler is None:
        return NSGA2 if several else TPE
    if sampler not in SAMPLERS:
        raise unknown_name("sampler", sampler, SAMPLERS, where="--sampler")
    if several != (sampler == NSGA2):
        wanted = f"{len(task.objectives)} objectives" if several else "one objective"
        raise InputError(f"{sampler} does not fit {wanted}", where="--sampler", allowed="tpe or cmaes for one objective, nsga2 for several")
    return sampler
