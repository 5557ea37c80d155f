"""The two kinds of engines that a scene can be played over: stubs, and real SGLang on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from tests.gpu.callers import body_of
from tests.gpu.cluster import Cluster, Process, stub_document
from tests.gpu.stub.text import answer, prompt_of

QUICK = aiohttp.ClientTimeout(total=5)


class World(Protocol):
    ready_s: float
    """How long a cluster may take to start, and a scene to play."""
    long_tokens: int
    """Output of a call that is still running when something breaks."""
    hang_s: float
    """Longer than an engine that is well says nothing."""

    def document(self, directory: Path, instances: Sequence[dict[str, Any]], **parts: dict[str, Any]) -> dict[str, Any]:
        """A cluster file."""

    def right(self, path: str, model: str, prompt: str, tokens: int, text: str, whole: bool) -> bool:
        """Whether ``text`` is what the model says, all of it or its beginning."""

    async def hang(self, cluster: Cluster, http: aiohttp.ClientSession, model: str) -> None:
        """Its engine's scheduler takes no step any more; its HTTP server lives."""

    async def idle(self, engine: Process, http: aiohttp.ClientSession) -> bool:
        """Whether the engine runs no call."""


class StubWorld:
    ready_s = 240.0
    long_tokens = 400
    hang_s = 3.0

    def document(self, directory: Path, instances: Sequence[dict[str, Any]], **parts: dict[str, Any]) -> dict[str, Any]:
        return stub_document(directory, instances, step_s=0.005, **parts)

    def right(self, path: str, model: str, prompt: str, tokens: int, text: str, whole: bool) -> bool:
        expected = answer(prompt_of(path, body_of(path, model, prompt, tokens, True)), tokens)
        return text == expected if whole else expected.startswith(text)

    async def hang(self, cluster: Cluster, http: aiohttp.ClientSession, model: str) -> None:
        async with http.post(f"{cluster.engine(model).url}/stub/hang", timeout=QUICK) as answered:
            assert answered.status == 200

    async def idle(self, engine: Process, http: aiohttp.ClientSession) -> bool:
        async with http.get(f"{engine.url}/stub/state", timeout=QUICK) as state:
            return bool((await state.json())["running"] == 0)


class EngineWorld:
    """Texts are compared between calls with the same prompt: greedy, in float32, whatever runs beside them."""

    ready_s = 600.0
    long_tokens = 300
    hang_s = 20.0

    def __init__(self, models: Path, engine: dict[str, Any]) -> None:
        self._paths = {"m0": models / "qwen3", "m1": models / "llama"}
        self._engine = engine
        self._said: dict[tuple[str, str, str, int], str] = {}

    def document(self, directory: Path, instances: Sequence[dict[str, Any]], **parts: dict[str, Any]) -> dict[str, Any]:
        parts["engine"] = self._engine | parts.get("engine", {}) | {"log_dir": str(directory / "logs")}
        document = stub_document(directory, instances, **parts)
        for name, model in document["models"].items():
            model |= {"path": str(self._paths[name]), "kv_tokens": 20_000}
        return document

    def right(self, path: str, model: str, prompt: str, tokens: int, text: str, whole: bool) -> bool:
        key = (path, model, prompt, tokens)
        if whole:
            return self._said.setdefault(key, text) == text
        return key not in self._said or self._said[key].startswith(text)

    async def hang(self, cluster: Cluster, http: aiohttp.ClientSession, model: str) -> None:
        schedulers = [each for each in cluster.below(cluster.engine(model)) if "scheduler" in each.command[0]]
        assert schedulers
        for scheduler in schedulers:
            os.kill(scheduler.pid, signal.SIGSTOP)

    async def idle(self, engine: Process, http: aiohttp.ClientSession) -> bool:
        async with http.get(f"{engine.url}/v1/loads", timeout=QUICK) as loads:
            found = (await loads.json())["loads"]
        return all(load["num_running_reqs"] == load["num_waiting_reqs"] == 0 for load in found)
