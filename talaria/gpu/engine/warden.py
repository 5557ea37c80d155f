"""Parent of one engine: ``python warden.py DIRECTORY COMMAND...``, standard library only.

The agent holds the other end of its stdin. When that closes (the agent stopped the engine, or died, by whatever signal) or when the
engine's first process ends, the warden kills every process that the engine has started, waits for all of them, removes DIRECTORY and
what they left in /dev/shm, and ends with the first process's exit status. Its stdout gets one line: the first process's id, which is
also its process group's.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHM = "/dev/shm"
_LEFT_BEHIND = ("sgl_shm_", "sglang_loads_", "sem.mp-", "multi_tokenizer_args_")
_CLOSE_LOOKS = 60
"""A second apart, while an engine starts, and may fail."""
_LONGEST_POLL_S = 10.0
"""What an engine has mapped since the last look is not known, and stays, if all of it is killed at once."""


class Told(Exception):
    """SIGTERM."""


def _children(parent: int) -> list[int]:
    """Direct children, from /proc: parents are in the field after the state, which follows the command's last parenthesis."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


def _descendants(parent: int) -> set[int]:
    found, new = set[int](), [parent]
    while new:
        children = _children(new.pop())
        found.update(children)
        new.extend(children)
    return found


def _mapped(pids: set[int]) -> set[int]:
    """Inodes of the shared memory that these processes have mapped."""
    inodes = set[int]()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                inodes.update(int(line.split()[4]) for line in file if f" {_SHM}/" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return inodes


def _clean(pids: set[int], inodes: set[int]) -> None:
    """Unlink what engines leave in shared memory: what was mapped, or has one of these process ids in its name (sgl_shm_mq_PID_RANDOM)."""
    for name in os.listdir(_SHM):
        path = os.path.join(_SHM, name)
        try:
            if name.startswith(_LEFT_BEHIND) and (os.stat(path).st_ino in inodes or not pids.isdisjoint(_numbers(name))):
                os.unlink(path)
        except OSError:  # gone already, or another user's
            continue


def _numbers(name: str) -> set[int]:
    return {int(part) for part in name.split("_") if part.isdigit()}


def _watch(pid: int, seen: set[int], inodes: set[int]) -> None:
    """Return when the process has ended, or nobody wants it any more; until then, note now and then, ever more rarely, what it has."""
    ended = os.pidfd_open(pid)
    wait_s, looks = 1.0, 0
    while not select.select([sys.stdin, ended], [], [], wait_s)[0]:
        seen |= _descendants(pid)
        inodes |= _mapped(seen)
        looks += 1
        wait_s = 1.0 if looks < _CLOSE_LOOKS else min(2 * wait_s, _LONGEST_POLL_S)


def _kill_all() -> None:
    """End every descendant: as their subreaper this process becomes the parent of those whose own have died."""
    while children := _children(os.getpid()):
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _tie() -> None:
    """In the engine's first process: die with the warden, should that be killed itself; SGLang's processes die with their parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _told(number: int, frame: FrameType | None) -> None:
    raise Told


def main(directory: str, command: list[str]) -> int:
    last = max(int(descriptor) for descriptor in os.listdir("/proc/self/fd"))
    os.closerange(3, last + 1)  # an agent's end of another warden's stdin, kept open here, would keep that alive
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _told)
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, preexec_fn=_tie)
    seen, inodes = {engine.pid}, set[int]()
    try:
        print(engine.pid, flush=True)
        _watch(engine.pid, seen, inodes)
    except (Told, BrokenPipeError):
        pass
    seen |= _descendants(engine.pid)
    inodes |= _mapped(seen)
    ended = engine.poll()
    _kill_all()
    _clean(seen, inodes)
    shutil.rmtree(directory, ignore_errors=True)
    return 128 + signal.SIGKILL if ended is None else ended % 256 if ended >= 0 else 128 - ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
