"""``run``: a trace against real engines."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria.cli.console import note
from talaria.cli.options import JsonOption, parse_assignments, parse_knobs, parse_names, parse_seeds
from talaria.errors import InputError

if TYPE_CHECKING:
    from talaria.gpu.config import ClusterConfig
    from talaria.gpu.run.batch import Batch
    from talaria.gpu.run.client import Endpoint
    from talaria.gpu.run.plan import Case, ReplayPlan

app = typer.Typer(add_completion=False)

DEFAULT_GAP_CAP_S = 10.0
INTERRUPTED = 130

ClusterArgument = Annotated[Path | None, typer.Argument(metavar="[CLUSTER]", help="A cluster file: serve it for the time of the run.")]
UrlOption = Annotated[
    str | None, typer.Option(metavar="URL", help="A gateway that is up; its keys are in TALARIA_KEY and TALARIA_ADMIN_KEY.")
]
TraceOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The talaria.trace/1 to replay.")]
MapOption = Annotated[list[str] | None, typer.Option(metavar="SRC=DST", help="Run the trace's model SRC as the served DST.")]
ArrivalsOption = Annotated[
    str | None, typer.Option(metavar="KIND", help="How sessions start: trace, closed_pool:5, poisson:0.2, all_at_once ...")
]
GapCapOption = Annotated[float, typer.Option(metavar="SECONDS", help="Recorded gaps are capped at this; 0: not at all.")]
ConfigOption = Annotated[str | None, typer.Option(metavar="NAME", help="Router and switches: see `talaria-sim configs`.")]
ConfigsOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Several in turn, the first being the base of the comparison.")]
PolicyOption = Annotated[Path | None, typer.Option(metavar="FILE", help="A policy file: knobs, and optionally a config.")]
SetOption = Annotated[list[str] | None, typer.Option(metavar="KNOB=VALUE", help="Set a knob: see `talaria-sim knobs`.")]
SeedOption = Annotated[str | None, typer.Option(metavar="N", help="One seed, of the arrivals and of the prompts' content.")]
SeedsOption = Annotated[str | None, typer.Option(metavar="N|A:B", help="A repetition for each of the seeds 0..N-1, or A..B-1.")]
OutOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write the results to this directory.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a run into --out that broke: finished repetitions are kept.")]


@app.command()
def run(
    cluster: ClusterArgument = None, url: UrlOption = None, trace: TraceOption = None, map: MapOption = None,
    arrivals: ArrivalsOption = None, gap_cap: GapCapOption = DEFAULT_GAP_CAP_S, config: ConfigOption = None, configs: ConfigsOption = None,
    policy: PolicyOption = None, set: SetOption = None, seed: SeedOption = None, seeds: SeedsOption = None, out: OutOption = None,
    resume: ResumeOption = False, json: JsonOption = False,
) -> None:  # fmt: skip
    """Replay a trace through HTTP against real engines, under one or several policies.

    Writes what `talaria-sim run` writes; `talaria-gpu validate` compares the two.
    """
    repetitions = parse_seeds(seed, seeds, default=1)
    if (cluster is None) == (url is None):
        raise InputError("needs a cluster file or --url", where="talaria-gpu run", allowed="exactly one of CLUSTER and --url URL")
    if trace is None:
        raise InputError("there is nothing to replay", where="talaria-gpu run", fix="add --trace FILE")
    if resume and out is None:
        raise InputError("needs the directory of the run that broke", where="--resume", fix="add --out DIR")
    if not 0 <= gap_cap < float("inf"):
        raise InputError(f"{gap_cap:g}", where="--gap-cap", allowed="seconds, or 0 for no cap")
    mapping = parse_assignments(map or (), "--map", "SRC=DST", "claude-opus=big")
    settings = parse_assignments(set or (), "--set", "KNOB=VALUE", "tau=2")
    loaded = _loaded(cluster)
    cases = _cases(loaded, config, configs, policy, parse_knobs(settings, "--set"), out)

    from talaria.gpu.run.client import GatewayFailed
    from talaria.gpu.run.plan import plan
    from talaria.report.conservation import ConservationError

    def planned_for(served: Mapping[str, int | None]) -> ReplayPlan:
        return plan(trace, served, mapping=mapping, arrivals=arrivals, gap_cap_s=gap_cap or None, seeds=repetitions)

    if out is not None:
        _check_place(out)
    if loaded is not None:  # engines take minutes to start: what does not need them is said before
        planned_for(dict.fromkeys(loaded.models))
    try:
        with _endpoint(loaded, url) as endpoint, _kept_place(out) as place:
            planned = planned_for(asyncio.run(_served(endpoint)))
            code = _replay(planned, cases, endpoint, place, out, resume=resume, as_json=json)
    except (GatewayFailed, ConservationError) as error:
        note(f"error: {error}")
        code = 1
    raise typer.Exit(code)


def _loaded(cluster: Path | None) -> ClusterConfig | None:
    if cluster is None:
        return None
    from talaria.gpu import config

    return config.load(cluster)


def _cases(
    cluster: ClusterConfig | None, config: str | None, configs: str | None, policy: Path | None, settings: Mapping[str, object],
    out: Path | None,
) -> list[Case]:  # fmt: skip
    """One case per configuration. Raises InputError where two of them are the same thing on real engines."""
    from talaria.cli import policyfile
    from talaria.gpu.run.plan import Case
    from talaria.policy.knobs import Knobs, with_values
    from talaria.sim import config as known

    if config is not None and configs is not None:
        raise InputError("given together with --configs", where="--config", allowed="one of --config and --configs")
    saved = policyfile.load(policy) if policy else policyfile.Policy()
    own = policyfile.Policy()
    if cluster is not None:
        file = cluster.policy.file
        own = policyfile.load(Path(file)) if file else own
        own = replace(own, knobs={**own.knobs, **parse_knobs(cluster.policy.knobs, "policy.knobs")})
    names = (config or saved.config or own.config or "talaria",) if configs is None else parse_names(
        configs, list(known.CONFIGS), kind="config", where="--configs"
    )  # fmt: skip
    stages = cluster is not None and any(item.arena is not None for item in cluster.instances)
    found: dict[tuple[str, bool, bool], str] = {}
    cases = []
    for name in names:
        chosen = known.get(name)
        same = found.setdefault((chosen.router, chosen.session_prefill, stages and chosen.staging), name)
        if same != name:
            raise InputError(
                f"{same} and {name} are the same on these engines", where="--configs",
                allowed="configurations that differ in router or session-prefill, or in staging where instances have an arena",
                fix="leave one of them out",
            )  # fmt: skip
        staging = {} if chosen.staging else {"stage_rate": 0.0}
        knobs = with_values(Knobs(), {**own.knobs, **chosen.knobs, **saved.knobs, **settings, **staging})
        cases.append(Case(name, chosen.router, chosen.session_prefill, knobs, out if len(names) == 1 else None))
    return cases


def _check_place(directory: Path) -> None:
    """Hours later would be too late to learn that it cannot be written."""
    from talaria.report.files import StagedDirectory

    with StagedDirectory(directory):
        pass


@contextmanager
def _endpoint(cluster: ClusterConfig | None, url: str | None) -> Iterator[Endpoint]:
    from talaria.gpu.run.local import endpoint_of, gateway

    if url is not None:
        yield endpoint_of(url)
        return
    assert cluster is not None
    with gateway(cluster, note) as endpoint:
        yield endpoint


@contextmanager
def _kept_place(out: Path | None) -> Iterator[Path]:
    """Where finished repetitions wait for the others: beside the output, or for the time of this run."""
    if out is not None:
        yield out.absolute().with_name(f".{out.name}.resume")
        return
    with tempfile.TemporaryDirectory(prefix="talaria-run-") as folder:
        yield Path(folder, "kept")


async def _served(endpoint: Endpoint) -> dict[str, int | None]:
    import aiohttp

    from talaria.gpu.run.client import Client

    async with aiohttp.ClientSession() as http:
        return await Client(http, endpoint).models()


def _replay(
    planned: ReplayPlan, cases: list[Case], endpoint: Endpoint, place: Path, out: Path | None, *, resume: bool, as_json: bool
) -> int:
    from talaria.cli.console import progress
    from talaria.gpu.run.batch import Batch
    from talaria.gpu.run.kept import Kept

    inputs = {**planned.document(), "content": planned.content, "cases": {case.label: case.document() for case in cases}}
    batch = Batch(planned, cases, Kept(place, inputs, resume=resume), note)
    for line in planned.notes:
        note(line)
    code = 0
    with progress("replaying", batch.calls()) as advance:
        try:
            asyncio.run(batch.run(endpoint, advance))
        except KeyboardInterrupt:
            note("interrupted; finished repetitions are kept for --resume" if out else "interrupted")
            code = INTERRUPTED
    _finish(batch, out if len(cases) > 1 else None, as_json=as_json)
    if code == 0:
        batch.kept.discard()
    return code


def _finish(batch: Batch, comparison: Path | None, *, as_json: bool) -> None:
    """Write and show what is finished; a ``comparison`` appears as a whole, in place of an earlier one."""
    from talaria.cli.collect import peak_rss_mib
    from talaria.cli.console import show_document
    from talaria.report import tables
    from talaria.report.files import StagedDirectory

    if comparison is not None:
        with StagedDirectory(comparison) as staged:
            batch.cases = [replace(case, directory=staged.staging / case.label) for case in batch.cases]
            documents = batch.finish({}, peak_rss_mib())
            if documents:
                document = _compared(batch, documents, staged.staging)
                staged.commit()
    else:
        documents = batch.finish({}, peak_rss_mib())
        if len(batch.cases) > 1 and documents:
            document = _compared(batch, documents, None)
        elif documents:
            (document,) = documents.values()
    if documents:
        show_document(document, tables.compare_table if len(batch.cases) > 1 else tables.run_table, as_json=as_json)


def _compared(batch: Batch, documents: Mapping[str, Any], out: Path | None) -> dict[str, Any]:
    from talaria.report.comparison import write
    from talaria.report.document import compare_document
    from talaria.report.statistics import paired

    document = compare_document(documents, paired({label: batch.results[label] for label in documents}))
    if out is not None:
        write(out, document, {label: batch.records[label] for label in documents})
    return document
