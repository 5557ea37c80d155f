"""Runs over several seeds or points on the machine's cores: results come in the order of the items, whatever finishes first."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self, TypeVar

from talaria.sim.interrupts import withheld

T = TypeVar("T")
R = TypeVar("R")

WORTH_WORKERS_S = 4.0
"""A worker takes about half a second of processor time to start; with less work left than this, a second one gains little."""
MAX_WORKERS = 8


def ordered_map(function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
    """``map`` in a pool of its own; see ``Pool``. Closing the iterator (Ctrl-C included) ends the workers."""
    with Pool(len(items)) as pool:
        yield from pool.map(function, items)


class Pool:
    """Worker processes where they pay, kept from one ``map`` to the next. A context manager: leaving it ends them.

    ``total``: items that all maps together will have, about. ``jobs``: most workers; None: one a core. Items run here until their
    mean processor time says that the rest is worth workers. Where no worker can be started, all run here; where one dies, the item
    whose turn it is runs here and the others in new workers.
    """

    def __init__(self, total: int, jobs: int | None = None) -> None:
        self._left, self._jobs = total, jobs or min(_cores(), MAX_WORKERS)
        self._done, self._spent_s = 0, 0.0
        self._executor: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        """Results in the order of ``items``. ``function`` must be importable by name, items and results picklable.

        An exception of ``function`` reaches the caller at its item's turn and ends the workers, as closing the iterator does.
        """
        done, broken = 0, False
        while done < len(items):
            if self._worth_workers(len(items) - done) and not broken:
                try:
                    for result in self._in_workers(function, items[done:]):
                        done += 1
                        self._left -= 1
                        yield result
                except BrokenProcessPool:
                    broken = True
                except PermissionError:
                    self._jobs = 1
            else:
                broken = False
                started_s = time.process_time()
                result = function(items[done])
                self._spent_s += time.process_time() - started_s
                self._done += 1
                done += 1
                self._left -= 1
                yield result

    def _worth_workers(self, ready: int) -> bool:
        """Once they are running they are used; to start them, enough must be left, and more than one item now."""
        if self._executor is not None:
            return True
        if self._jobs == 1 or ready == 1 or not self._done:
            return False
        return self._spent_s / self._done * max(self._left, ready) > WORTH_WORKERS_S

    def _in_workers(self, function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        try:
            if self._executor is None:
                self._executor = ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
            before = set(multiprocessing.active_children())
            with withheld():
                results = self._executor.map(function, items)
            self._processes |= set(multiprocessing.active_children()) - before
            yield from results
        except BaseException:
            self._end(terminate=True)
            raise

    def _end(self, *, terminate: bool) -> None:
        if terminate:
            for process in self._processes:
                process.terminate()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor, self._processes = None, set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(terminate=error is not None)


def _end_with_parent() -> None:
    """In a worker: end when the caller is gone. Killed, it ends nobody, and the workers would compute on, then wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _cores() -> int:
    """Cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
