"""Several processes on one study, one of them killed in the middle of its trials: none is lost, none counts twice, the study completes.

On PostgreSQL from Debian's packages, through Optuna's gRPC proxy, in a journal and in an SQLite file.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from optuna import load_study
from optuna.trial import TrialState

from talaria.tune.places import FINISHED, WORKER
from talaria.tune.storage import opened
from talaria.tune.study import PLANNED
from tests.conftest import REPOSITORY
from tests.tune.small import swept
from tests.tune.worker import AXES, SEEDS, TRIALS

LONG_S = 240
"""Far more than any step takes on a busy machine: a deadline, not a measurement."""

PROXY = (
    "import sys, logging, optuna\n"
    "from optuna.storages import run_grpc_proxy_server, get_storage\n"
    "run_grpc_proxy_server(get_storage(sys.argv[1]), host='127.0.0.1', port=int(sys.argv[2]))"
)


def postgres_program(name: str) -> str | None:
    """Debian keeps them off the path, by version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def wait_until(true: Callable[[], Any], what: str) -> None:
    until_s = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < until_s, f"{what} took too long"
        time.sleep(0.05)


@contextmanager
def started(*command: str, **keywords: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(command, text=True, cwd=REPOSITORY, **keywords)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=LONG_S)


@pytest.fixture
def postgresql() -> Iterator[str]:
    """The URL of an empty database on a server of its own."""
    initdb, postgres = postgres_program("initdb"), postgres_program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("needs PostgreSQL's server (Debian: apt-get install postgresql)")
    place = Path(tempfile.mkdtemp(prefix="talaria-pg-", dir="/tmp"))
    owner: dict[str, Any] = {}
    if os.geteuid() == 0:  # the server refuses to run as root; its package makes the user
        owner = {"user": "postgres", "group": "postgres"}
        shutil.chown(place, "postgres", "postgres")
    data, url = str(place / "data"), f"postgresql://talaria@/postgres?host={place}"
    try:
        made = [initdb, "-D", data, "-A", "trust", "-U", "talaria", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, timeout=LONG_S, cwd="/", **owner)
        settings = ["-c", "fsync=off", "-c", "listen_addresses=", "-c", f"unix_socket_directories={place}"]
        with started(postgres, "-D", data, *settings, stderr=subprocess.DEVNULL, **owner) as server:
            wait_until(lambda: server.poll() is not None or accepts(url), "PostgreSQL's start")
            assert server.poll() is None, f"PostgreSQL ended with {server.returncode}"
            yield url
    finally:
        shutil.rmtree(place, ignore_errors=True)


def accepts(url: str) -> bool:
    import psycopg

    with suppress(psycopg.OperationalError), psycopg.connect(url):
        return True
    return False


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """The URL of a gRPC proxy in front of an SQLite file."""
    for _ in range(5):  # the port may be taken between its choice and its use
        port = free_port()
        server = [sys.executable, "-W", "ignore", "-c", PROXY, f"sqlite:///{tmp_path}/behind.db", str(port)]
        with started(*server, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda ended=process.poll, to=port: ended() is not None or answers(to), "the proxy's start")
            if process.poll() is None:
                yield f"grpc://127.0.0.1:{port}"
                return
    pytest.fail("the proxy did not start")


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(params=["postgresql", "proxy", "journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in ("postgresql", "proxy"):
        url: str = request.getfixturevalue(request.param)
        return url
    return f"journal:{tmp_path}/study.log" if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


def worker(storage: str, kind: str = "tune") -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "tests.tune.worker", kind, storage]


def test_no_trial_is_lost_or_counted_twice_when_a_process_is_killed(storage: str, tmp_path: Path) -> None:
    mark = tmp_path / "in-a-trial"
    with started(*worker(storage), str(mark)) as victim:
        wait_until(lambda: mark.exists() or victim.poll() is not None, "the first replays")
        with started(*worker(storage)) as first, started(*worker(storage)) as second:
            assert victim.poll() is None, "it stands still in the middle of its trials"
            victim.send_signal(signal.SIGKILL)
            assert victim.wait(timeout=LONG_S) == -signal.SIGKILL
            assert [first.wait(timeout=LONG_S), second.wait(timeout=LONG_S)] == [0, 0]
    with opened(storage) as kept:
        trials = load_study(study_name="shared", storage=kept).get_trials()
    finished = [trial for trial in trials if trial.state in FINISHED]
    assert len(finished) == TRIALS
    assert [trial.state for trial in trials if trial.state in (TrialState.RUNNING, TrialState.WAITING)] == []
    assert len({str(trial.params) for trial in finished}) == TRIALS
    lost = [trial for trial in trials if str(trial.user_attrs.get(WORKER)).endswith(f":{victim.pid}") and trial.state == TrialState.FAIL]
    again = {str(trial.params) for trial in finished}
    assert lost and {str(trial.params) for trial in lost} <= again


@pytest.mark.parametrize("storage", ["postgresql", "sqlite"], indirect=True)
def test_processes_that_start_together_make_one_study(storage: str) -> None:
    with started(*worker(storage)) as first, started(*worker(storage)) as second, started(*worker(storage)) as third:
        assert [process.wait(timeout=LONG_S) for process in (first, second, third)] == [0, 0, 0]
    with opened(storage) as kept:
        trials = load_study(study_name="shared", storage=kept).get_trials()
    assert sum(trial.state in FINISHED for trial in trials) == TRIALS
    assert sum(PLANNED in trial.user_attrs and trial.state in FINISHED for trial in trials) == 1


@pytest.mark.parametrize("storage", ["journal", "sqlite"], indirect=True)
def test_a_sweep_that_two_share_has_every_point_once_when_one_is_killed(storage: str, tmp_path: Path) -> None:
    mark = tmp_path / "in-a-point"
    with started(*worker(storage, "sweep"), str(mark)) as victim:
        wait_until(lambda: mark.exists() or victim.poll() is not None, "the first points")
        with started(*worker(storage, "sweep")) as other:
            assert victim.poll() is None, "it stands still in the middle of its points"
            victim.send_signal(signal.SIGKILL)
            assert victim.wait(timeout=LONG_S) == -signal.SIGKILL
            assert other.wait(timeout=LONG_S) == 0
    alone, _ = swept(AXES, SEEDS)
    with opened(storage) as kept:
        shared, whole = swept(AXES, SEEDS, kept)
    trials = shared.studied.trials()
    assert whole and shared.points() == alone.points() and len(shared.points()) == 10
    assert sorted(trial.user_attrs[PLANNED] for trial in trials if trial.state in FINISHED) == list(range(10))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE, TrialState.FAIL}
