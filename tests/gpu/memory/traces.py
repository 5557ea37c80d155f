"""What processes of engines have on this machine beside themselves, to be gone when they are."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path


def left_behind() -> dict[str, object]:
    """What a run could leave in this process."""
    gc.collect()
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return {
        "memory": sorted(name for name in files if "memfd:" in name),
        "sockets": sum("socket:" in name for name in files),
        "pidfds": sum("pidfd" in name for name in files),
        "mapped": sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def processes(groups: Sequence[int]) -> Iterator[int]:
    """Living ones of these process groups."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(ProcessLookupError):
                if os.getpgid(int(name)) in groups:
                    yield int(name)


def files(groups: Sequence[int]) -> dict[int, list[str]]:
    """By process, what its descriptors are."""
    found: dict[int, list[str]] = {}
    for process in processes(groups):
        with suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    found.setdefault(process, []).append(os.readlink(f"/proc/{process}/fd/{name}"))
    return found


def memory_files(groups: Sequence[int]) -> dict[int, int]:
    """By process, how many descriptors of nameless memory it has."""
    return {process: sum("memfd:" in name for name in names) for process, names in files(groups).items()}


def shared_files(groups: Sequence[int]) -> set[str]:
    """Shared memory with a name that they have open or mapped."""
    names = {name for opened in files(groups).values() for name in opened}
    for process in processes(groups):
        with suppress(OSError):
            names.update(line.split(maxsplit=5)[-1] for line in Path(f"/proc/{process}/maps").read_text().splitlines())
    return {name for name in names if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}
