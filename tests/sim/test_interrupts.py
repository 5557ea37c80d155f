"""Ctrl-C: never in the middle of keeping a result, never in a worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest

from talaria.sim.interrupts import deferred, withheld


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupts_are_blocked(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_waits_for_the_end_of_what_is_being_finished() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred():
        interrupt()
        done.append("the rest")
    assert done == ["the rest"]


def test_a_second_interrupt_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred():
        interrupt()
        interrupt()
        done.append("the rest")
    assert done == []


def test_an_error_inside_is_raised_as_it_is_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="full"), deferred():
        interrupt()
        raise OSError("full")
    assert signal.getsignal(signal.SIGINT) is before


def test_without_an_interrupt_nothing_is_raised_on_any_thread() -> None:
    done = []

    def finish() -> None:
        with deferred():
            done.append(threading.current_thread().name)

    thread = threading.Thread(target=finish, name="other")
    thread.start()
    thread.join()
    finish()
    assert done == ["other", "MainThread"]


def test_processes_started_inside_do_not_see_interrupts() -> None:
    with withheld(), multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(interrupts_are_blocked, [0]) == [True]
    assert not interrupts_are_blocked(0)
