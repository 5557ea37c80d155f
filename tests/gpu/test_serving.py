"""How the processes of a served cluster are set up."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from talaria.gpu.serving import Stream
from tests.gpu.callers import PATHS, Caller
from tests.gpu.cluster import Cluster, Process, stub_document

USUAL = 160
"""Too few files for the calls below; engines need less."""


def most_files(process: Process) -> int:
    (line,) = [line for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if line.startswith("Max open files")]
    return int(line.split()[3])


def test_as_many_clients_are_served_as_the_system_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def play(cluster: Cluster) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            caller = Caller(cluster, http)
            await asyncio.gather(*(caller.ask("m0", f"number {n}", 20, path=PATHS[n % 4], session=f"s{n}") for n in range(USUAL)))
            assert caller.tally() == {"completed": USUAL}

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL, hard))
        with Cluster(tmp_path, stub_document(tmp_path)) as cluster:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert {most_files(process) for kind in ("gateway", "agent") for process in cluster.processes(kind)} == {hard}
            asyncio.run(asyncio.wait_for(play(cluster), 180.0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("status", [200, 299, 420, 599])
def test_a_stream_has_whatever_status_the_engine_gave_it(status: int) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        stream = Stream(request, status, {"content-type": "text/event-stream"})
        stream.begin(b"data")
        return stream.end()

    async def main() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        try:
            await site.start()
            host, port = runner.addresses[0]
            async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/") as got:
                assert (got.status, await got.read()) == (status, b"data")
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 60.0))
