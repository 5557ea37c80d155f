"""Agents of the gateway's own host: started, found, started again, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from talaria.gpu import config as cluster
from talaria.gpu.gateway.main import gateway
from talaria.gpu.protocol import agent as wire
from talaria.policy.knobs import Knobs
from tests.gpu.gateway.fake import run, say

CHILD = str(Path(__file__).with_name("fake_child.py"))
COMMAND = (sys.executable, CHILD)


def config_of(directory: Path) -> cluster.ClusterConfig:
    document = {
        "schema": "talaria.cluster/1", "name": "test", "models": {"m": {"path": str(directory)}},
        "instances": [{"name": "a", "models": ["m"]}], "gateway": {"port": 0, "admin_key": {"value": "root"}},
    }  # fmt: skip
    return cluster.check(document, "test")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_child_agent_is_started_started_again_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("talaria.gpu.gateway.children.FIRST_RESTART_S", 0.05)
    pids = tmp_path / "pids"

    def started() -> list[int]:
        return [int(line) for line in pids.read_text().split()] if pids.exists() else []

    async def served(http: aiohttp.ClientSession, url: str) -> None:
        while (await http.get(f"{url}/ready")).status != 200:
            await asyncio.sleep(0.02)
        async with http.post(f"{url}/v1/chat/completions", json=say("hi")) as answer:
            assert answer.status == 200

    async def test() -> None:
        async with gateway(config_of(tmp_path), Knobs(), agent_command=COMMAND) as url, aiohttp.ClientSession() as http:
            await served(http, url)
            (first,) = started()
            os.kill(first, signal.SIGKILL)
            while len(started()) < 2:
                await asyncio.sleep(0.02)
            await served(http, url)
        assert not any(alive(pid) for pid in started())

    try:
        run(test())
    finally:
        for pid in started():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_an_agent_whose_port_is_taken_says_so_in_one_line_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real agent: it listens before it starts an engine."""
    monkeypatch.setattr("talaria.gpu.gateway.children.FIRST_RESTART_S", 0.05)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            config = config_of(tmp_path)
            (instance,) = config.instances
            config = config.model_copy(update={"instances": (instance.model_copy(update={"port": port}),)})
            async with gateway(config, Knobs()) as url, aiohttp.ClientSession() as http:
                while "agent_given_up" not in caplog.text:
                    await asyncio.sleep(0.02)
                assert (await http.get(f"{url}/ready")).status == 503
            assert "event=agent_given_up instance=a code=2" in caplog.text and "agent_ended" not in caplog.text
            (line,) = capfd.readouterr().err.strip().splitlines()
            assert f"instance a: 127.0.0.1:{port}" in line and "address already in use" in line and "choose another port" in line

    run(test())


def test_a_child_keeps_its_gateways_time_though_the_clock_was_set_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every call would be beyond its deadline for an agent that starts an hour later by the clock."""
    monkeypatch.setattr(wire, "_WALL_S", wire.clock_s() - 7200.0)

    async def test() -> None:
        async with gateway(config_of(tmp_path), Knobs(), agent_command=COMMAND) as url, aiohttp.ClientSession() as http:
            while (await http.get(f"{url}/ready")).status != 200:
                await asyncio.sleep(0.02)

    run(test())
    assert "clock_differs" not in caplog.text
