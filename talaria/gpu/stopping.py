"""When a process of ours is to stop: by a signal, or with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from talaria.errors import InputError


def stop_event(*, at_eof: bool) -> asyncio.Event:
    """Set by SIGINT and SIGTERM and, with ``at_eof``, when standard input ends.

    A parent that holds the other end of a pipe there cannot leave its child behind, however it dies. Raises InputError where it is a file.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if at_eof:
        descriptor = sys.stdin.fileno()

        def read() -> None:
            if not os.read(descriptor, 4096):
                loop.remove_reader(descriptor)
                stop.set()

        try:
            loop.add_reader(descriptor, read)
        except PermissionError:  # a file, or /dev/null: of that no end can be waited for
            raise InputError("standard input is no pipe", where="--until-eof", fix="hold the other end of a pipe open there") from None
    return stop
