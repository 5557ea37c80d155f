"""One kind of error for everything a user can get wrong: a single clear line, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 30  # of a registry's names; a trace can have thousands of sessions


class InputError(Exception):
    """Bad input. ``str(error)`` is one line: where, what, what is allowed, how to fix.

    Raised by every loader and option parser; the command line prints it and exits with 2.
    """

    def __init__(self, what: str, *, where: str = "", allowed: str = "", fix: str = "") -> None:
        self.what, self.where, self.allowed, self.fix = what, where, allowed, fix
        parts = [f"{where}: {what}" if where else what]
        if allowed:
            parts.append(f"allowed: {allowed}")
        if fix:
            parts.append(fix)
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


def unknown_name(kind: str, name: str, known: Iterable[str], *, where: str = "") -> InputError:
    """The error for a name that is not in a registry, with the nearest valid one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    fix = f"did you mean {near[0]!r}?" if near else ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return InputError(f"unknown {kind} {name!r}", where=where, allowed=", ".join(names[:_SHOWN]) + more, fix=fix)
