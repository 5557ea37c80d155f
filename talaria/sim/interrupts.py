"""Ctrl-C where it may not strike: while something is being finished that must not be left half done, and in worker processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """An interrupt inside is raised at the end, so that what stands inside happens as a whole; a second one is raised at once."""
    if threading.current_thread() is not threading.main_thread():  # signals are handled there, nothing can strike here
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def withheld() -> Iterator[None]:
    """Processes started inside never see a Ctrl-C, which a terminal sends to all of them: they are their parent's to end."""
    resource_tracker.ensure_running()  # multiprocessing lets signals through again when it starts this one
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
