"""A gateway of our own for the time of a command: another process, on a free port, with an admin key that only we know."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

import msgspec

from talaria.errors import InputError
from talaria.gpu.config import ClusterConfig, Secret, header_value
from talaria.gpu.run.client import Endpoint, GatewayFailed

ADMIN_VARIABLE = "TALARIA_RUN_ADMIN_KEY"
POLL_S = 0.2
STOP_S = 90.0
"""Draining and stopping all engines may take so long."""


@contextmanager
def gateway(config: ClusterConfig, waiting: Callable[[str], None]) -> Iterator[Endpoint]:
    """Start ``talaria-gpu serve`` and stop it at the end; ``waiting`` is told what is being waited for.

    Raises InputError for a key that is not set and a log that cannot be written, GatewayFailed.
    """
    key = config.gateway.keys[0].key.read(f"gateway.keys: {config.gateway.keys[0].name}") if config.gateway.keys else None
    admin_key, port = secrets.token_urlsafe(24), _free_port()
    ours = config.gateway.model_copy(update={"host": "127.0.0.1", "port": port, "admin_key": Secret(env=ADMIN_VARIABLE)})
    document = config.model_copy(update={"gateway": ours}).model_dump(mode="json", by_alias=True, exclude_none=True)
    log_path = Path(config.engine.log_dir) / "gateway.log"
    with _opened(log_path) as log, tempfile.TemporaryDirectory(prefix="talaria-run-") as folder:
        path = Path(folder, "cluster.yaml")  # JSON is YAML
        path.write_text(json.dumps(document), encoding="utf-8")
        command = [sys.executable, "-m", "talaria.cli.gpu", "serve", str(path), "--until-eof"]
        environment = {**os.environ, ADMIN_VARIABLE: admin_key}
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            waiting(f"engines are starting ({len(config.instances)} instances; the gateway's log is {log_path})")
            _until_ready(url, process, config.engine.start_timeout_s * len(config.models), log_path)
            yield Endpoint(url, key, admin_key)
        finally:
            _stop(process)


class _Ready(msgspec.Struct):
    instances: dict[str, bool]


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", where=str(log), fix="choose another engine.log_dir") from None


def _until_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float, log_path: Path) -> None:
    """A process of its own, which can only be asked. Raises GatewayFailed."""
    until_s = time.monotonic() + timeout_s
    while not _is_ready(url):
        if process.poll() is not None:
            raise GatewayFailed(f"the gateway ended with code {process.returncode}: {_last_line(log_path)} (see {log_path})")
        if time.monotonic() > until_s:
            raise GatewayFailed(f"the gateway was not ready after {timeout_s:g} s; see {log_path}")
        time.sleep(POLL_S)


def _is_ready(url: str) -> bool:
    """All instances, not only enough to serve every model: what is measured is the whole cluster."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return all(msgspec.json.decode(response.read(), type=_Ready).instances.values())
    except (OSError, HTTPException, msgspec.DecodeError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its own way first; what is left of its process group is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdin is not None
    process.stdin.close()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def endpoint_of(url: str) -> Endpoint:
    """A gateway that runs elsewhere; its keys come from ``TALARIA_KEY`` and ``TALARIA_ADMIN_KEY``. Raises InputError."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is no URL", where="--url", allowed="http://HOST:PORT")
    keys = {name: os.environ.get(name) for name in ("TALARIA_KEY", "TALARIA_ADMIN_KEY")}
    shown = {name: None if key is None else header_value(key, name) for name, key in keys.items()}
    return Endpoint(url.rstrip("/"), shown["TALARIA_KEY"], shown["TALARIA_ADMIN_KEY"])
