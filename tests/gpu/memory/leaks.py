"""What a process has of host pools, and of others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_KINDS = ("socket:", "/memfd:talaria", "anon_inode:[pidfd]", "pidfd")


def descriptors() -> set[tuple[str, str]]:
    """What this process has open, apart from files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return {(name, target) for name, target in found if target.startswith(_KINDS)}


def mappings() -> int:
    return sum("/memfd:talaria-" in line for line in Path("/proc/self/maps").read_text().splitlines())
