"""Runs over several seeds or points on the machine's cores: results come in the order of the items, whatever finishes first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

WORTH_WORKERS_S = 2.0
"""A worker takes about half a second to start; below this much remaining work the caller's process is as fast."""
MAX_WORKERS = 8


def ordered_map(function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
    """``map`` with worker processes where they pay. ``function`` must be importable by name, items and results picklable.

    The first item always runs here and its duration decides about the rest. Where no worker can be started, or one dies,
    the rest runs here too. An exception of ``function`` reaches the caller at its item's turn; closing the iterator
    (Ctrl-C included) ends the workers.
    """
    if not items:
        return
    started_s = time.perf_counter()
    first = function(items[0])
    remaining_s = (time.perf_counter() - started_s) * (len(items) - 1)
    yield first
    done = 1
    workers = min(_cores(), MAX_WORKERS, len(items) - 1)
    if workers > 1 and remaining_s > WORTH_WORKERS_S:
        try:
            for result in _in_workers(function, items[1:], workers):
                yield result
                done += 1
        except (BrokenProcessPool, PermissionError):
            pass  # what is missing runs here
    for item in items[done:]:
        yield function(item)


def _cores() -> int:
    """Cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_workers(function: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[R, None, None]:
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from executor.map(function, items)
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
