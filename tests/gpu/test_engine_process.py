"""An engine's processes: none survives its agent or its own first process, and none leaves anything behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from talaria.gpu.engine.process import Process, complaint, fresh_log, mask

# Spawns a tree as SGLang does: children of the first process, one of them in a session of its own with a child again; all ignore SIGTERM.
TREE = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids, depth, apart = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "apart"
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\\n")
    if depth:
        subprocess.Popen([sys.executable, __file__, pids, str(depth - 1), sys.argv[3]], start_new_session=apart and depth == 2)
        subprocess.Popen([sys.executable, __file__, pids, "0", ""])
    time.sleep(600)
    """
)
SIZE = 5


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """A command that becomes ``SIZE`` processes, and the file where each writes its id."""
    script, pids = tmp_path / "tree.py", tmp_path / "pids"
    script.write_text(TREE)
    yield [sys.executable, str(script), str(pids), "2", "apart"], pids
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)


def alive(pids: Path) -> list[int]:
    return [pid for pid in written(pids) if Path(f"/proc/{pid}").exists()]


def written(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()] if pids.exists() else []


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        time.sleep(0.02)


def test_stopping_ends_every_process_and_removes_the_directory(tree: tuple[list[str], Path], tmp_path: Path) -> None:
    command, pids = tree
    own = tmp_path / "own"
    own.mkdir()

    async def main() -> None:
        process = await Process.start(command, os.environ, own, fresh_log(tmp_path, "engine"))
        await asyncio.to_thread(wait_until, lambda: len(written(pids)) == SIZE)
        assert os.getpgid(process.pid) == process.pid
        await process.kill()

    asyncio.run(main())
    assert not alive(pids)
    assert not own.exists()


def test_the_end_of_the_first_process_ends_all_and_is_told(tree: tuple[list[str], Path], tmp_path: Path) -> None:
    command, pids = tree

    async def main() -> int:
        process = await Process.start(command, os.environ, tmp_path / "own", fresh_log(tmp_path, "engine"))
        await asyncio.to_thread(wait_until, lambda: len(written(pids)) == SIZE)
        os.kill(process.pid, signal.SIGKILL)
        return await process.wait()

    assert asyncio.run(main()) == 128 + signal.SIGKILL
    assert not alive(pids)


@pytest.mark.parametrize("victim", ["agent", "warden", "both"])
def test_nothing_survives_a_killed_agent_or_warden(tree: tuple[list[str], Path], tmp_path: Path, victim: str) -> None:
    command, pids = tree
    command = command if victim == "agent" else [*command[:-1], "together"]
    agent_code = f"""
import asyncio, os, pathlib
from talaria.gpu.engine.process import Process, fresh_log
async def main():
    here = pathlib.Path({str(tmp_path)!r})
    process = await Process.start({command!r}, os.environ, here / "own", fresh_log(here, "engine"))
    await process.wait()
    await asyncio.sleep(600)
asyncio.run(main())
"""
    agent = subprocess.Popen([sys.executable, "-c", agent_code], cwd=Path(__file__).parents[2])
    try:
        wait_until(lambda: len(written(pids)) == SIZE)
        first = written(pids)[0]
        warden = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in {"agent": [agent.pid], "warden": [warden], "both": [agent.pid, warden]}[victim]:
            os.kill(pid, signal.SIGKILL)
        if victim == "both":  # the first process is tied to the warden, and what SGLang's starts is tied to it
            wait_until(lambda: first not in alive(pids))
        else:
            wait_until(lambda: not alive(pids))
    finally:
        agent.kill()
        agent.wait()


def test_shared_memory_that_the_engine_made_is_removed(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex[:8]
    code = f"""
import mmap, os, pathlib, time
shm, maps = pathlib.Path("/dev/shm"), []
(shm / f"sgl_shm_mq_{{os.getpid()}}_{mark}").write_bytes(bytes(64))  # closed again: found by the process id
for name in ("sglang_loads_{mark}.shm", "other_{mark}"):
    with (shm / name).open("w+b") as file:
        file.truncate(64)
        maps.append(mmap.mmap(file.fileno(), 64))
(shm / "done_{mark}").touch()
time.sleep(600)
"""
    shm = Path("/dev/shm")

    def mine() -> list[str]:
        return sorted(path.name for path in shm.iterdir() if mark in path.name)

    async def main() -> None:
        process = await Process.start([sys.executable, "-c", code], os.environ, tmp_path / "own", fresh_log(tmp_path, "engine"))
        await asyncio.to_thread(wait_until, lambda: len(mine()) == 4)
        await process.kill()

    try:
        asyncio.run(main())
        assert mine() == [f"done_{mark}", f"other_{mark}"], "nothing else is touched"
    finally:
        for name in mine():
            (shm / name).unlink()


def test_an_interpreter_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere.*see .*engine\.log"):
        asyncio.run(Process.start(["/nowhere/python"], os.environ, tmp_path / "own", fresh_log(tmp_path, "engine")))


def test_the_last_logs_are_kept(tmp_path: Path) -> None:
    for number in range(9):
        fresh_log(tmp_path, "engine").write_text(f"start {number}")
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"engine.log": "start 8", **{f"engine.{age}.log": f"start {8 - age}" for age in range(1, 6)}}


def test_a_complaint_is_the_last_exception(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Traceback (most recent call last):\nOSError: first\n[12:00] then\nsglang.MemoryError: too small\n\nbye\n\n")
    assert complaint(log) == f"sglang.MemoryError: too small; see {log}"
    log.write_text("nothing special\n\n")
    assert complaint(log) == f"nothing special; see {log}"


def test_a_secret_is_overwritten_while_the_log_is_written(tmp_path: Path) -> None:
    log = fresh_log(tmp_path, "engine")
    with log.open("a") as writer:
        writer.write("key=s3cret and key=s3cret\n")
        writer.flush()
        mask(log, "s3cret")
        writer.write("more\n")
    assert log.read_text() == "key=****** and key=******\nmore\n"
    assert log.stat().st_mode & 0o077 == 0
