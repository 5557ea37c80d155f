"""What gateway and agent add to a streamed call, over a stub engine on loopback: time to the first chunk, and processor time.

    python -m benchmarks.gateway [--rate 200] [--seconds 10] [--rounds 3] [--in-flight 1000]

The same load goes to the engine itself, through a 40-line aiohttp pass-through and through the gateway, round by round, the
direct path being the yardstick for time and the pass-through for processor time. Clients keep their connections; one variant
acknowledges as late as TCP may. Last, as many streams as ``--in-flight`` are held open at once.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import report
from talaria.gpu.engine.command import free_port
from tests.gpu.cluster import KEY, Cluster, Process, stub_document, wait_for

TOKENS = 20
STEP_S = 0.005
ALONE = 100
"""Calls sent one after the other: without others beside them, a delay of Nagle's algorithm stands out."""
FIRST_P50_MS, FIRST_P99_MS, CPU_MS, PLACEMENT_P99_MS = 3.0, 15.0, 2.5, 1.0
ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Way:
    """One way to the engine, and what was seen on it."""

    url: str
    processes: dict[str, Process]
    """Whose processor time counts, by name; beside them the client's own."""
    quick_ack: bool = True
    first_ms: list[float] = field(default_factory=list)
    calls: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def run(self, **load: Any) -> dict[str, Any]:
        before = {name: process.cpu_s() for name, process in self.processes.items()}
        outcome = send({"url": self.url, "key": KEY, "tokens": TOKENS, "quick_ack": self.quick_ack, **load})
        for name, process in self.processes.items():
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + process.cpu_s() - before[name]
        self.cpu_s["client"] = self.cpu_s.get("client", 0.0) + outcome["cpu_s"]
        self.calls += load["calls"]
        self.first_ms += [1e3 * seconds for seconds in outcome["first_s"]]
        for what, count in outcome["outcomes"].items():
            if what != "completed":
                self.failed[what] = self.failed.get(what, 0) + count
        return outcome

    def percentile_ms(self, percent: float) -> float:
        return float(np.percentile(self.first_ms, percent))

    def cpu_ms(self, name: str) -> float:
        """Of one call."""
        return 1e3 * self.cpu_s[name] / self.calls


def send(load: dict[str, Any]) -> dict[str, Any]:
    """Run a load in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.load", json.dumps(load)], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    outcome: dict[str, Any] = json.loads(done.stdout)
    if outcome["errors"]:
        print(outcome["outcomes"], outcome["errors"][0], file=sys.stderr)
    return outcome


@contextmanager
def passthrough(target: str) -> Iterator[tuple[str, Process]]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.passthrough", str(port), target]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for("the pass-through listens", lambda: answers(url))
            yield url, Process(process.pid, tuple(command), 0)
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    return True


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def placement_p99_ms(url: str) -> float:
    """Upper edge of the histogram's bucket that holds the p99."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = re.findall(r'^talaria_place_seconds_bucket\{le="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    total = float(found[-1][1])
    return next(1e3 * float(edge) for edge, count in found if float(count) >= 0.99 * total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        instance = {"name": "g0", "pool": "hot", "models": ["m0"], "max_running": 2 * given.in_flight}
        document = stub_document(Path(directory), [instance], step_s=STEP_S)
        document["models"]["m0"]["kv_tokens"] = 10_000_000
        with Cluster(Path(directory), document) as cluster:
            measure(cluster, given)


def measure(cluster: Cluster, given: argparse.Namespace) -> None:
    engine, agent = cluster.engine("m0"), cluster.agent("g0")
    (gateway,) = cluster.processes("gateway")
    hop = {"gateway": gateway, "agent": agent, "engine": engine}
    with passthrough(engine.url) as (url, process):
        paths = {
            "direct": Way(engine.url, {"engine": engine}), "direct, late ACK": Way(engine.url, {}, quick_ack=False),
            "pass-through": Way(url, {"pass-through": process, "engine": engine}), "pass-through, late ACK": Way(url, {}, quick_ack=False),
            "gateway": Way(cluster.url, hop), "gateway, late ACK": Way(cluster.url, hop, quick_ack=False),
        }  # fmt: skip
        for number in range(given.rounds):
            for path in paths.values():
                path.run(calls=int(given.rate * given.seconds), rate=given.rate, seed=number)
        alone = {name: Way(way.url, {}, quick_ack=False) for name, way in paths.items() if "," not in name}
        for way in alone.values():
            way.run(calls=ALONE, workers=1, sessions=1, seed=given.rounds)
    placement_ms = placement_p99_ms(cluster.url)
    step_s = given.in_flight / given.rate / TOKENS
    post(f"{engine.url}/stub/timing", {"step_s": step_s})
    held = Way(cluster.url, hop)
    outcome = held.run(calls=3 * given.in_flight, rate=given.rate, sessions=2 * given.in_flight, seed=given.rounds + 1)
    show(paths, placement_ms, given)
    direct = alone.pop("direct")
    rows = [
        (f"{name}: added p50 / p99", f"{way.percentile_ms(50) - direct.percentile_ms(50):.2f} / "
         f"{way.percentile_ms(99) - direct.percentile_ms(99):.2f} ms", "no 40 ms")
        for name, way in alone.items()
    ]  # fmt: skip
    report("one stream at a time, late ACK", rows)
    rows = [
        ("most streams at once", f"{outcome['most_in_flight']}", f"about {given.in_flight}"),
        ("completed", f"{held.calls - sum(held.failed.values())} of {held.calls}", "all"),
        ("gateway, agent CPU a call", f"{held.cpu_ms('gateway'):.2f}, {held.cpu_ms('agent'):.2f} ms", ""),
    ]
    report(f"{given.in_flight} streams held", rows)


def show(paths: dict[str, Way], placement_ms: float, given: argparse.Namespace) -> None:
    rows = []
    for name, path in paths.items():
        base = paths["direct" if path.quick_ack else "direct, late ACK"]
        added = [path.percentile_ms(percent) - base.percentile_ms(percent) for percent in (50, 99)]
        bar = f"at most {FIRST_P50_MS:g} / {FIRST_P99_MS:g} ms" if name.startswith("gateway") else ""
        if path is base:
            rows.append((f"{name}: first chunk p50 / p99", f"{path.percentile_ms(50):.2f} / {path.percentile_ms(99):.2f} ms", ""))
        else:
            rows.append((f"{name}: added p50 / p99", f"{added[0]:.2f} / {added[1]:.2f} ms", bar))
        rows += [(f"{name}: not completed", str(path.failed), "none")] if path.failed else []
    through, gateway = paths["pass-through"].cpu_ms("pass-through"), paths["gateway"]
    rows += [
        ("pass-through CPU a call", f"{through:.2f} ms", ""),
        ("gateway CPU a call", f"{gateway.cpu_ms('gateway'):.2f} ms", f"at most {CPU_MS:g} ms"),
        ("  over the pass-through", f"{gateway.cpu_ms('gateway') / through:.2f}", "aim: 2"),
        ("agent CPU a call", f"{gateway.cpu_ms('agent'):.2f} ms", ""),
        *(
            (f"client, engine CPU a call: {name}", f"{paths[name].cpu_ms('client'):.2f}, {paths[name].cpu_ms('engine'):.2f} ms", "")
            for name in ("direct", "pass-through", "gateway")
        ),
        ("placement on the event loop p99", f"{placement_ms:.2f} ms", f"at most {PLACEMENT_P99_MS:g} ms"),
    ]
    report(f"{given.rate:g} streamed calls/s, {TOKENS} chunks at {1e3 * STEP_S:g} ms, 8 KB bodies", rows)


if __name__ == "__main__":
    main()
