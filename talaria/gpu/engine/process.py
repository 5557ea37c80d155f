"""The processes of one start of an engine, under a warden that leaves none of them behind, and their log."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from talaria.gpu.engine import warden

_KEPT_LOGS: Final = 5
_TAIL_BYTES: Final = 64 * 1024
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_OURS: Final = "talaria: "
"""Begins the last line of a process that our plugin ends."""


def fresh_log(directory: Path, name: str) -> Path:
    """Path of a new log ``name.log``; the last few before it are kept as ``name.1.log`` (the newest) and so on."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"{name}.log"
    older = [log, *(directory / f"{name}.{number}.log" for number in range(1, _KEPT_LOGS + 1))]
    for newer, old in reversed(list(itertools.pairwise(older))):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(old)
    log.touch(mode=0o600)
    return log


def complaint(log: Path) -> str:
    """What our plugin said of the end last, else the last exception in a log, else its last line, and where the log is, or was: somebody
    may have cleared it away."""
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    ours = [line for line in lines if line.startswith(_OURS)]
    return "; ".join([*(ours or exceptions or lines)[-1:], f"see {log}"])


def mask(log: Path, secret: str) -> None:
    """Overwrite a secret in a log that is still being written: SGLang prints its arguments, keys included."""
    text = log.read_bytes()
    with log.open("r+b") as file:
        at = text.find(secret.encode())
        while at >= 0:
            file.seek(at)
            file.write(b"*" * len(secret))
            at = text.find(secret.encode(), at + len(secret))


class Process:
    """One engine's processes. ``pid`` is the first one's, and their process group's."""

    def __init__(self, parent: asyncio.subprocess.Process, pid: int) -> None:
        self.pid = pid
        self._parent = parent

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> Process:
        """Spawn ``command``; ``directory`` is removed when it has ended. Raises OSError where the interpreter is not there."""
        with log.open("ab") as file:
            parent = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(warden.__file__), str(directory), *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file, env=environment, start_new_session=True,
            )  # fmt: skip
        assert parent.stdin is not None and parent.stdout is not None
        try:
            said = await parent.stdout.readline()
        except BaseException:
            parent.stdin.close()  # given up: the warden clears away
            raise
        if not said:
            await parent.wait()
            raise OSError(complaint(log))
        return cls(parent, int(said))

    async def wait(self) -> int:
        """Exit status of the first process (128 + signal); by then all processes have ended."""
        status = await self._parent.wait()
        if status < 0:  # the warden itself was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return status

    async def kill(self) -> None:
        """End all processes and wait for that."""
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        await self.wait()
