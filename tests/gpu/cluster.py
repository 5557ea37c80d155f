"""A served cluster of real processes for tests and benchmarks: ``talaria-gpu serve`` over stub engines, or over any.

    with Cluster(directory, stub_document(directory)) as cluster:
        cluster.url ...

All processes of a cluster carry a mark in their environment, by which they are found also when they have lost their parent; at
the end every one of them is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from talaria.gpu.engine.command import free_port

STUB = Path(__file__).resolve().parent / "stub" / "python"
MARK = "TALARIA_TEST_CLUSTER"
AGENT = "talaria.gpu.agent.main"
KEY, ADMIN_KEY = "key-of-tests", "admin-key-of-tests"
SERVE = (sys.executable, "-c", "from talaria.cli.gpu import main; main()", "serve")


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true value of ``condition``, which may raise OSError for not yet. Fails with ``what`` after ``timeout_s``."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            if value := condition():
                return value
        except OSError:
            pass
        if time.monotonic() > until_s:
            raise TimeoutError(f"after {timeout_s:g} s: {what}")
        time.sleep(0.02)


def stub_document(
    directory: Path, instances: Sequence[dict[str, Any]] = ({"name": "g0", "models": ["m0", "m1"]},), *,
    step_s: float = 0.002, start_s: float = 0.0, **parts: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A cluster file with stub engines; ``parts`` are merged into its ``gateway``, ``engine``, ``policy`` or ``models``."""
    models: dict[str, Any] = {}
    for name in sorted({name for instance in instances for name in instance["models"]}):
        path = directory / "models" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text('{"architectures": ["Stub"]}')
        models[name] = {"path": str(path), "kv_tokens": 400_000}
    document: dict[str, Any] = {
        "schema": "talaria.cluster/1",
        "name": "stub",
        "gateway": {
            "port": free_port(),
            "keys": [{"name": "tests", "key": {"value": KEY}, "max_in_flight": 4096}],
            "admin_key": {"value": ADMIN_KEY},
        },
        "models": models,
        "instances": [dict(instance) for instance in instances],
        "engine": {
            "python": str(STUB),
            "environment": {"STUB_PYTHON": sys.executable, "STUB_STEP_S": str(step_s), "STUB_START_S": str(start_s)},
            "log_dir": str(directory / "logs"),
        },
        "policy": {},
    }
    for part, values in parts.items():
        document[part] |= values
    return document


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    command: tuple[str, ...]
    parent: int

    @property
    def kind(self) -> str:
        """``gateway``, ``agent``, ``warden`` (of an engine), ``engine`` (its first process) or ``other``."""
        if AGENT in self.command or "--agent" in self.command:
            return "agent"
        if any(word.endswith("warden.py") for word in self.command):
            return "warden"
        if "--served-model-name" in self.command:
            return "engine"
        return "gateway" if "serve" in self.command else "other"

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]

    @property
    def url(self) -> str:
        """Of an engine."""
        return f"http://127.0.0.1:{self.option('--port')}"

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Cluster:
    """``ready_s``: how long it may take to start."""

    def __init__(self, directory: Path, document: dict[str, Any], ready_s: float = 180.0) -> None:
        self.directory, self.document = directory, document
        self._ready_s = ready_s
        self._mark = f"{MARK}={uuid.uuid4()}"
        self._gateway: subprocess.Popen[bytes] | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{document['gateway']['port']}"

    def __enter__(self) -> Self:
        try:
            for instance in self.document["instances"]:
                if "url" in instance:
                    self.start_agent(instance["name"])
            self.start()
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the gateway, and through it the agents of this host."""
        self._gateway = self._spawn()

    def start_agent(self, instance: str) -> subprocess.Popen[bytes]:
        """Start the agent of an instance with ``url``, as on another host."""
        return self._spawn("--agent", instance)

    def _spawn(self, *options: str) -> subprocess.Popen[bytes]:
        file = self.directory / "cluster.yaml"
        file.write_text(yaml.safe_dump(self.document))
        name, _, value = self._mark.partition("=")
        with (self.directory / "serve.log").open("ab") as log:
            child = subprocess.Popen(
                [*SERVE, str(file), "--until-eof", *options], env={**os.environ, name: value}, cwd=self.directory, stdin=subprocess.PIPE,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._children.append(child)
        return child

    def wait_ready(self) -> None:
        """Until ``/ready`` says so. Raises RuntimeError with the log if the gateway ends instead."""

        def ready() -> bool:
            if self._gateway is not None and self._gateway.poll() is not None:
                raise RuntimeError(f"the gateway has ended:\n{self.log()}")
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except urllib.error.HTTPError:
                return False

        try:
            wait_for("the cluster is ready", ready, self._ready_s)
        except TimeoutError as error:
            raise RuntimeError(f"{error}\n{self.log()}") from None

    def terminate(self, timeout_s: float = 120.0) -> int:
        """SIGTERM to the gateway, as an operator ends it. Returns its exit code."""
        assert self._gateway is not None
        self._gateway.terminate()
        return self._gateway.wait(timeout_s)

    def abandon(self) -> None:
        """As when whoever started the gateway and its agents has died."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()

    def kill_gateway(self) -> None:
        """As by a crash: nothing else is told."""
        assert self._gateway is not None
        self._gateway.kill()
        self._gateway.wait(10)

    def kill(self) -> None:
        """End every process of the cluster at once."""
        for _ in range(50):
            left = self.processes()
            for process in left:
                _signal(process.pid, signal.SIGKILL)
            for child in self._children:
                if child.poll() is None:
                    child.kill()
            if not left:
                break
            time.sleep(0.05)
        for child in self._children:
            child.wait(10)
            assert child.stdin is not None
            child.stdin.close()

    def log(self) -> str:
        """The end of what gateway and agents printed."""
        parts = [self.directory / "serve.log", *sorted((self.directory / "logs").rglob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in parts if path.is_file())

    # --- processes ------------------------------------------------------------------------------------------------------

    def processes(self, kind: str | None = None) -> list[Process]:
        """Those that live, by pid: all with the mark, and what is below them, since a process that names itself loses its marks."""
        everybody = _everybody()
        ours = {pid for pid, (_, marks) in everybody.items() if self._mark.encode() in marks}
        while more := {pid for pid, (process, _) in everybody.items() if process.parent in ours} - ours:
            ours |= more
        return [everybody[pid][0] for pid in sorted(ours) if kind in (None, everybody[pid][0].kind)]

    def engine(self, model: str, instance: str | None = None) -> Process:
        """The engine of ``model``, on one instance where several have it."""
        agents = {agent.pid for agent in self.processes("agent") if instance in (None, agent.command[-1])}
        (found,) = [
            engine
            for engine in self.processes("engine")
            if engine.option("--served-model-name") == model and (instance is None or self._ancestors(engine) & agents)
        ]
        return found

    def agent(self, instance: str) -> Process:
        (found,) = [agent for agent in self.processes("agent") if instance == agent.command[-1]]
        return found

    def below(self, process: Process) -> list[Process]:
        """Its children, their children, and so on."""
        return [each for each in self.processes() if process.pid in self._ancestors(each)]

    def _ancestors(self, process: Process) -> set[int]:
        parents, found = {each.pid: each.parent for each in self.processes()}, set()
        pid = process.parent
        while pid in parents:
            found.add(pid)
            pid = parents[pid]
        return found


def _everybody() -> dict[int, tuple[Process, list[bytes]]]:
    """All processes that can be read and are no zombies, with their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            marks = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(entry.name)] = Process(int(entry.name), tuple(command), int(parent)), marks
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
