"""Command line and environment of one engine's SGLang server, on GPUs or on the CPU."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from talaria.gpu import config
from talaria.gpu.protocol import arena, memory
from talaria.gpu.protocol import engine as protocol

_PORTS: Final = range(20000, 32768)
"""Below the ports that outgoing connections get: a server binds its port only once its model is loaded."""
_LINKER: Final = {"linker": "HostLinker", "linker_module_path": "talaria.gpu.hooks.linker"}


@dataclass(frozen=True, slots=True)
class Place:
    """What one start of an engine has to itself: a port, a directory of sockets and temporary files, a key for its control endpoints."""

    port: int
    directory: Path
    admin_key: str
    pool: Path | None = None
    """Socket of the instance's host pool; None: the engine keeps nothing there."""
    arena: Path | None = None
    """Socket of the instance's arena; None: the engine's memory is its own."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_events(self) -> str:
        return f"ipc://{self.directory}/kv-events"

    @property
    def kv_replay(self) -> str:
        return f"ipc://{self.directory}/kv-replay"


def free_port() -> int:
    """A loopback port where nobody listens."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop - 1}")


def command(name: str, model: config.Model, instance: config.Instance, settings: config.Engine, place: Place) -> list[str]:
    """Arguments of the model and of the cluster come last, so they win. The key goes into a file, not onto the command line."""
    secrets = place.directory / "secrets.yaml"
    secrets.touch(mode=0o600)
    secrets.write_text(json.dumps({"admin-api-key": place.admin_key}))
    events = {"publisher": "zmq", "endpoint": place.kv_events, "replay_endpoint": place.kv_replay, "topic": "kv"}
    stated: list[tuple[str, object]] = [
        ("--config", secrets),
        ("--model-path", model.path),
        ("--served-model-name", name),
        ("--host", "127.0.0.1"),
        ("--port", place.port),
        ("--tp-size", instance.tp),
        ("--page-size", settings.page_tokens),
        ("--max-running-requests", instance.max_running),
        ("--max-total-tokens", model.kv_tokens),
        ("--schedule-policy", "fcfs"),
        ("--stream-interval", 1),
        ("--tool-call-parser", model.tool_parser),
        ("--reasoning-parser", model.reasoning_parser),
        ("--kv-events-config", json.dumps(events)),
        ("--log-level-http", "warning"),
    ]
    options = [word for flag, value in stated if value is not None for word in (flag, str(value))]
    if place.pool is not None:
        options += [
            "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic",
            "--unified-cache-external-linker-config", json.dumps(_LINKER),
        ]  # fmt: skip
    options += ["--enable-cache-report", "--enable-metrics", "--sleep-on-idle"]
    if instance.gpus:  # a graph of prefill cannot be given back and restored
        options += ["--enable-memory-saver", "--cuda-graph-backend-prefill", "disabled"]
        if place.arena is None:
            options.append("--enable-weights-cpu-backup")
    return [settings.python or sys.executable, "-m", "sglang.launch_server", *options, *settings.arguments, *model.arguments]


def environment(
    name: str, model: config.Model, instance: config.Instance, settings: config.Engine, place: Place, agent_socket: Path
) -> dict[str, str]:
    """The agent's own environment and what the engine needs beside it."""
    needed = {
        protocol.SOCKET_VARIABLE: str(agent_socket),
        protocol.MODEL_VARIABLE: name,
        "TMPDIR": str(place.directory),
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}",  # not in TMPDIR, which goes with the engine
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # a token from a released engine would read unmapped memory
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # they keep a crashed server, and its clients, for 5 s and more
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    if place.pool is not None:
        needed[memory.SOCKET_VARIABLE] = str(place.pool)
    if place.arena is not None:
        needed[arena.SOCKET_VARIABLE] = str(place.arena)
    if instance.gpus:
        needed |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, instance.gpus)),
            "TMS_RETAIN_CPU_BACKUP": "1",  # pinned once, not at every switch
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
            "NCCL_GRAPH_REGISTER": "0",  # registrations do not survive a remap
        }
    if instance.gpus and place.arena is not None:  # what an arena leaves of a GPU is little, and differs by what the first rank has more
        needed["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    return {**os.environ, **needed, **settings.environment, **model.environment}
