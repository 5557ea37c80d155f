"""A real engine whose agent is killed leaves no process, no shared memory and no directory behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from talaria.gpu import config
from tests.gpu.agent_process import CHAT, agent_process, descendants

pytestmark = pytest.mark.full
PATIENCE_S = 600.0
AGENT = """
import asyncio, pathlib, sys
from talaria.gpu import config
from talaria.gpu.engine.engine import Engine
from talaria.gpu.engine.holds import HoldServer

async def main():
    settings = config.Engine.model_validate_json(sys.argv[1])
    instance = config.Instance(name="g0", models=("big",), tp=int(sys.argv[4]), max_running=8)
    holds = HoldServer(lambda model, message: None, lambda model: None)
    await holds.start(pathlib.Path(sys.argv[3]) / "holds")
    engine = Engine("big", config.Model(path=sys.argv[2], kv_tokens=2000), instance, settings, holds, print)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def group(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def shared_memory(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    inodes = {line.split()[4] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " /dev/shm/" in line}
    return {path for path in Path("/dev/shm").iterdir() if str(path.stat().st_ino) in inodes}


def directory(leader: int) -> Path:
    variables = Path(f"/proc/{leader}/environ").read_bytes().split(b"\0")
    return Path(next(item for item in variables if item.startswith(b"TMPDIR=")).decode().removeprefix("TMPDIR="))


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_agent_leaves_nothing(tiny_models: Path, cpu_engine: config.Engine, tmp_path: Path, tp: int) -> None:
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * tp)}
    settings = cpu_engine.model_copy(update={"environment": {**cpu_engine.environment, **bound}})
    words = [sys.executable, "-c", AGENT, settings.model_dump_json(), str(tiny_models / "qwen3"), str(tmp_path), str(tp)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            leader = int(agent.stdout.readline())
            pids, own = group(leader), directory(leader)
            files = shared_memory(pids)
            assert len(pids) >= 3 and own.is_dir() and any("sglang_loads" in path.name for path in files)
            assert tp == 1 or any("sgl_shm_mq" in path.name for path in files)
        finally:
            os.kill(agent.pid, signal.SIGKILL)
    wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()] and not own.exists())
    assert not [path for path in files if path.exists()]


def arena_files(pid: int) -> int:
    """Chunks of arenas that a process has open."""
    return sum(link.readlink().name.startswith("memfd:talaria-device") for link in Path(f"/proc/{pid}/fd").iterdir())


def test_a_killed_agent_leaves_nothing_of_an_arena_and_a_pool_either(
    cpu_engine: config.Engine, tiny_models: Path, tmp_path: Path
) -> None:
    """In the middle of a call, with another model parked."""
    models = {name: {"path": str(tiny_models / name), "kv_tokens": 4096} for name in ("qwen3", "llama")}
    document = {
        "schema": "talaria.cluster/1", "name": "pair", "models": models,
        "instances": [
            {
                "name": "g0", "models": list(models), "max_running": 16, "host_kv_gib": 0.05,
                "arena": {"managed_gib": 0.03, "chunk_kib": 16},
            },
        ],
        "engine": cpu_engine.model_dump(mode="json"),
    }  # fmt: skip

    async def main() -> tuple[list[int], list[Path], set[Path]]:
        async with agent_process(document, "g0") as agent:
            await agent.until("the engines are up", lambda: agent.snapshot is not None, PATIENCE_S)
            assert agent.process is not None
            pids, own = descendants(agent.process.pid), [directory(agent.engine_pid(model)) for model in models]
            assert sum(arena_files(pid) > 1000 for pid in pids) == len(models) and all(path.is_dir() for path in own)
            files = shared_memory(pids)
            said = [{"role": "user", "content": "hi"}]
            body = {"model": "qwen3", "messages": said, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            _, headers = agent.submission("qwen3", "s", 0)
            async with agent.post(CHAT, body, headers) as answer:
                assert await answer.content.readany()
                agent.process.kill()
                await agent.process.wait()
            return pids, own, files

    pids, own, files = asyncio.run(main())
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids) and not any(path.exists() for path in own))
    assert not [path for path in files if path.exists()]
