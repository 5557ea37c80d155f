"""Order, errors and clean-up of runs in worker processes."""

from __future__ import annotations

import math
import multiprocessing
import operator
import os
import select
import signal
import subprocess
import sys

import pytest

from talaria.sim import parallel
from talaria.sim.parallel import ordered_map


@pytest.fixture
def workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WORTH_WORKERS_S", -1.0)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)


def kill_a_worker(parent: int) -> int:
    """The caller's process survives, a worker does not."""
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return parent


def pid(_: int) -> int:
    """Of the process that runs it."""
    return os.getpid()


def test_short_work_starts_no_process() -> None:
    assert list(ordered_map(operator.neg, range(5))) == [0, -1, -2, -3, -4]
    assert multiprocessing.active_children() == []


def test_nothing_to_do_gives_nothing() -> None:
    assert list(ordered_map(operator.neg, ())) == []


@pytest.mark.usefixtures("workers_at_once")
def test_results_come_in_the_order_of_the_items_and_no_worker_is_left() -> None:
    assert list(ordered_map(operator.neg, range(6))) == [0, -1, -2, -3, -4, -5]
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("workers_at_once")
def test_an_error_in_a_worker_reaches_the_caller_after_the_results_before_it() -> None:
    results = ordered_map(math.sqrt, [4.0, 9.0, -1.0, 16.0])
    assert [next(results), next(results)] == [2.0, 3.0]
    with pytest.raises(ValueError, match="math domain"):
        next(results)
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("workers_at_once")
def test_an_interrupted_caller_leaves_no_worker() -> None:
    results = ordered_map(operator.neg, range(100))
    assert next(results) == 0 and next(results) == -1
    results.close()
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("workers_at_once")
def test_work_whose_worker_died_runs_here() -> None:
    parent = os.getpid()
    assert list(ordered_map(kill_a_worker, [parent] * 4)) == [parent] * 4


KILLED = """
import os, signal
from talaria.sim import parallel
from tests.sim.test_parallel import pid

parallel.WORTH_WORKERS_S, parallel._cores = -1.0, lambda: 2
results = parallel.ordered_map(pid, range(100))
print(next(results), next(results), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waiting for somebody else's child needs Linux")
def test_a_killed_caller_leaves_no_worker() -> None:
    caller = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=120, check=False)
    assert caller.returncode == -signal.SIGKILL, caller.stderr
    own, worker = map(int, caller.stdout.split())
    assert worker != own
    try:
        ended = os.pidfd_open(worker)
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], 60.0)[0]
    finally:
        os.close(ended)
