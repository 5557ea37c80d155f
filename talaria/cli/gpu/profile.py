"""``profile``: measures a cluster's engines for the simulator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from talaria.cli.console import note
from talaria.cli.options import JsonOption
from talaria.errors import InputError

if TYPE_CHECKING:
    from talaria.gpu.config import ClusterConfig
    from talaria.gpu.profiling.measure import Measured
    from talaria.gpu.run.client import Endpoint

app = typer.Typer(add_completion=False)

GAP_CAP_S = 10.0

ClusterArgument = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster file.")]
OutOption = Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The profile to write; its scenario goes beside it.")]
UrlOption = Annotated[str | None, typer.Option(metavar="URL", help="It is served there; keys: TALARIA_KEY, TALARIA_ADMIN_KEY.")]
BaseOption = Annotated[str | None, typer.Option(metavar="PROFILE", help="Profile that gives what cannot be measured: memory, bandwidths.")]
TokensOption = Annotated[int, typer.Option(metavar="N", help="Longest prompt to measure.")]
RepeatsOption = Annotated[int, typer.Option(metavar="N", help="Repetitions of every point; their median counts.")]


@app.command()
def profile(
    cluster: ClusterArgument, out: OutOption, url: UrlOption = None, base: BaseOption = None, max_tokens: TokensOption = 65536,
    repeats: RepeatsOption = 3, json: JsonOption = False,
) -> None:  # fmt: skip
    """Measure prefill, decode, re-entry, restores, staging and switches of an idle cluster, and write a profile and its scenario."""
    for value, option, least in ((max_tokens, "--max-tokens", 256), (repeats, "--repeats", 1)):
        if value < least:
            raise InputError(f"{value} is too few", where=option, allowed=f"{least} or more")
    from talaria import profiles
    from talaria.gpu import config, modelfiles
    from talaria.gpu.profiling.write import common_tp
    from talaria.gpu.run.client import GatewayFailed
    from talaria.report.files import check_writable

    loaded = config.load(cluster)
    common_tp(loaded)
    check_writable(out)
    if base is not None:
        profiles.load(base)
    files = {name: modelfiles.read(model.path, f"{cluster}: models.{name}") for name, model in loaded.models.items()}
    try:
        with _serving(loaded, url) as (endpoint, open_s):
            measured = asyncio.run(_measure(endpoint, loaded, max_tokens, repeats))
    except GatewayFailed as error:
        note(f"error: {error}")
        raise typer.Exit(1) from None
    _write(loaded, measured, files, out, open_s, base, elsewhere=url is not None, as_json=json)


@contextmanager
def _serving(cluster: ClusterConfig, url: str | None) -> Iterator[tuple[Endpoint, float | None]]:
    """The endpoint, and what an engine's start took where we saw it: they start one after the other."""
    from talaria.gpu.run.local import endpoint_of, gateway

    if url is not None:
        yield endpoint_of(url), None
        return
    began_s = time.monotonic()
    with gateway(cluster, note) as endpoint:
        yield endpoint, (time.monotonic() - began_s) / max(len(item.models) for item in cluster.instances)


async def _measure(endpoint: Endpoint, cluster: ClusterConfig, max_tokens: int, repeats: int) -> Measured:
    import aiohttp

    from talaria.cli.console import progress
    from talaria.gpu.profiling.measure import Group, measure
    from talaria.gpu.run.client import Client

    groups = [
        Group(item.models, keeps=item.host_kv_bytes > 0, stages=item.arena is not None) for item in cluster.instances if item.pool == "cold"
    ]
    running = min(item.max_running for item in cluster.instances)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        client = Client(http, endpoint)
        served = await client.models()
        missing = [name for name in cluster.models if name not in served]
        if missing:
            raise InputError(f"does not serve {missing[0]!r}", where=endpoint.url, allowed=", ".join(served))
        with progress("measuring", None) as advance:
            return await measure(
                client, served, groups, running, max_tokens, repeats, advance, lambda total: note(f"{total} measurements")
            )  # fmt: skip


def _write(
    cluster: Any, measured: Any, files: Any, out: Path, open_s: float | None, base: str | None, *, elsewhere: bool, as_json: bool
) -> None:
    import yaml

    from talaria.cli.console import show_json, show_rows
    from talaria.gpu.doctor.machine import gpus
    from talaria.gpu.profiling import write
    from talaria.report.files import write_atomically

    found = [] if elsewhere else gpus()  # of a cluster elsewhere, what this machine has says nothing
    device = found[0].name if found else "unknown (served elsewhere)" if elsewhere else "CPU"
    source = f"talaria-gpu profile, {time.strftime('%Y-%m-%d')}, {device}"
    points = write.points(
        measured, cluster, files, name=out.stem, source=source, open_s=open_s, gpu=device if found or base is None else None,
        hbm_bytes=found[0].memory_bytes if found else None, base=base,
    )  # fmt: skip
    raw, beside = out.with_name(f"{out.stem}-points.json"), out.with_name(f"{out.stem}-scenario.yaml")
    write_atomically(raw, points.model_dump_json(by_alias=True, exclude_none=True, indent=1).encode())
    file = write.profile(points, measured)
    write_atomically(out, file.text().encode())
    write_atomically(beside, yaml.safe_dump(write.scenario(cluster, out, GAP_CAP_S), sort_keys=False).encode())
    note(f"written: {out}, {raw} and {beside}")
    poor = write.poor_fits(file, measured.models)
    for (model, curve), why in poor.items():
        note(f"warning: {model} {curve}: {why}; measure again on a machine that does nothing else")
    if as_json:
        show_json(
            {
                "schema": "talaria.profiled/1", "profile": str(out), "scenario": str(beside), "fits": file.document()["fits"],
                "poor_fits": [{"model": model, "curve": curve, "why": why} for (model, curve), why in poor.items()],
            }
        )  # fmt: skip
        return
    rows = [
        [name, curve, str(fit.points), f"{fit.median_error:.1%}", f"{fit.max_error:.1%}", fit.worst]
        for name, curves in file.fits.items()
        for curve, fit in curves.items()
    ]
    show_rows(("model", "curve", "points", "median error", "largest", "at"), rows, wrapped=("model", "at"))
