"""The directory with an agent's sockets: it goes with the agent, or, where that was killed, at the next one's start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_NEW: Final = "talaria-new-"
_PREFIX: Final = "talaria-instance-"


@contextlib.contextmanager
def own_directory() -> Iterator[Path]:
    """A new one, which only its user may enter. Raises OSError."""
    with contextlib.ExitStack() as stack:
        made = Path(tempfile.mkdtemp(prefix=_NEW))
        place = made.with_name(_PREFIX + made.name.removeprefix(_NEW))
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        _lock(made, stack)
        made.rename(place)  # it is locked by the time that others may think that nobody wants it
        for other in place.parent.glob(_PREFIX + "*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as trying:  # it is in use, gone meanwhile, or another user's
                _lock(other, trying)
                shutil.rmtree(other, ignore_errors=True)
        yield place


def _lock(directory: Path, stack: contextlib.ExitStack) -> None:
    """Until the process ends or the stack is left. Raises OSError where another has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
