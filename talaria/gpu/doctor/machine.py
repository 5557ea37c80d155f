"""What the machine has: GPUs as the driver tells them, memory, free ports."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from typing import NamedTuple

MIB = 2**20
QUERY = "index,name,memory.total,memory.used,driver_version"


class Gpu(NamedTuple):
    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    driver: str


def gpus() -> list[Gpu]:
    """By number; empty where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        asked = subprocess.run(
            [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse(asked.stdout)


def parse(text: str) -> list[Gpu]:
    """The driver's own table; rows that say "N/A" where a number should be are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and all(cells[at].isdecimal() for at in (0, 2, 3)):
            found.append(Gpu(int(cells[0]), cells[1], int(cells[2]) * MIB, int(cells[3]) * MIB, cells[4]))
    return found


def memory_bytes() -> int:
    """Of the host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def open_files() -> int:
    """How many a process of this user may have open at most, once it has asked for that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def port_is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError):  # the latter of a name that is none
            return False
    return True
