"""Runs over several seeds or points on the machine's cores: results come in the order of the items, whatever finishes first."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from talaria.sim.interrupts import withheld

T = TypeVar("T")
R = TypeVar("R")

WORTH_WORKERS_S = 4.0
"""A worker takes about half a second of processor time to start; with less work left than this, a second one gains little."""
MAX_WORKERS = 8


def ordered_map(function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
    """``map`` with worker processes where they pay. ``function`` must be importable by name, items and results picklable.

    Items run here until their mean processor time says that the rest is worth workers. Where no worker can be started, or one
    dies, the rest runs here too. An exception of ``function`` reaches the caller at its item's turn; closing the iterator
    (Ctrl-C included) ends the workers.
    """
    done, spent_s = 0, 0.0
    workers_failed = False
    while done < len(items):
        left = len(items) - done
        workers = min(_cores(), MAX_WORKERS, left)
        if done and workers > 1 and not workers_failed and spent_s / done * left > WORTH_WORKERS_S:
            try:
                for result in _in_workers(function, items[done:], workers):
                    yield result
                    done += 1
            except (BrokenProcessPool, PermissionError):
                workers_failed = True
        else:
            started_s = time.process_time()
            result = function(items[done])
            spent_s += time.process_time() - started_s
            yield result
            done += 1


def _cores() -> int:
    """Cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_workers(function: Callable[[T], R], items: Sequence[T], workers: int) -> Generator[R, None, None]:
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, mp_context=context)
    try:
        with withheld():
            results = executor.map(function, items)
        yield from results
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
