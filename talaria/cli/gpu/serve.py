"""``serve``: the gateway of a cluster, or one agent of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from talaria.cli.console import note

app = typer.Typer(add_completion=False)

ClusterArgument = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster file.")]
AgentOption = Annotated[str | None, typer.Option(metavar="NAME", help="Serve only this instance: its agent, for a gateway elsewhere.")]
EofOption = Annotated[bool, typer.Option(help="Stop when standard input ends, too: a program that started it cannot leave it behind.")]


@app.command()
def serve(cluster: ClusterArgument, agent: AgentOption = None, until_eof: EofOption = False) -> None:
    """Serve a cluster until SIGTERM or Ctrl-C: the gateway with the agents and engines of this host, or one agent with its engines."""
    from talaria.errors import unknown_name
    from talaria.gpu import config
    from talaria.gpu.agent.beliefs import knobs_of, timing_of
    from talaria.gpu.serving import allow_many_connections

    loaded = config.load(cluster)
    allow_many_connections()  # also its children
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if agent is None:
        for item in loaded.instances:
            if item.url is None:
                timing_of(loaded, item)  # what its agent would stumble over, said before anything starts
        from talaria.gpu.gateway.main import run_gateway

        run_gateway(
            loaded, knobs_of(loaded.policy), reload=lambda: config.load(cluster), at_eof=until_eof,
            on_ready=lambda url: note(f"serving at {url}"),
        )  # fmt: skip
        return
    from talaria.gpu.agent.main import run_agent

    instance = next((found for found in loaded.instances if found.name == agent), None)
    if instance is None:
        raise unknown_name("instance", agent, [found.name for found in loaded.instances], where="--agent")
    run_agent(loaded, instance, at_eof=until_eof)
