"""Between the gateway and an instance agent.

A call travels as HTTP: the gateway posts the client's body to the same path at the agent, with ``SUBMIT_HEADER``; the answer is the
client's answer, byte for byte, so that backpressure and disconnects need no rules of their own. Everything else travels over one
WebSocket per gateway and agent (``LINK_PATH``), as MessagePack: telemetry and books to the gateway, leases to the agent.

The gateway numbers submissions per instance. The agent's ``seen_seq`` is the last number up to which it has seen all;
``Void`` fills the gap of a submission that never arrived.

An agent of the gateway's own host is its child, ``python -m talaria.gpu.agent.main NAME``: the first line on its standard input is the
cluster (``ClusterConfig`` as JSON, by alias), ``KEY_VARIABLE`` holds the bearer key to ask of its callers; once it listens it writes one
line to its standard output, ``{"port": N}``. It stops when its standard input ends, so that it never outlives its gateway.

Times are seconds on the wall clock, monotonic within a process; hosts are expected to keep time (the gateway warns otherwise).
Policy values (calls, snapshots, summaries) travel as the JSON of ``policy.codec``.
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

LINK_PATH: Final = "/talaria/link"
SUBMIT_HEADER: Final = "x-talaria-submit"
"""``Submit`` as JSON."""
GATEWAY_HEADER: Final = "x-talaria-gateway"
"""On the link's handshake: names the gateway process. Another name than before begins a new numbering of submissions, from 1."""
KEY_VARIABLE: Final = "TALARIA_AGENT_KEY"
"""Environment variable with a child agent's key; an agent on another host has its key in the cluster file."""

CLOCK_VARIABLE: Final = "TALARIA_CLOCK_S"
"""Environment variable of a child agent: ``clock_s`` of its gateway. The wall clock may have been set since that started."""

_WALL_S: Final = float(os.environ.get(CLOCK_VARIABLE) or time.time() - time.monotonic())


def clock_s() -> float:
    """What this process adds to the host's monotonic clock."""
    return _WALL_S


def now_s() -> float:
    """The clock of both sides: wall time at the start of the process, of the gateway where an agent is its child, then monotonic."""
    return clock_s() + time.monotonic()


class Submit(msgspec.Struct, frozen=True):
    """In ``SUBMIT_HEADER``: the call as the router saw it."""

    seq: int
    call: msgspec.Raw
    """``policy.calls.Call`` as JSON of ``policy.codec``. Its token counts are the gateway's estimates."""
    deadline_s: float | None = None
    """The client is answered with an error at this time."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class AgentHello(_Message, frozen=True):
    """First message of a link, and again after a reset."""

    instance: str
    version: str
    abi: int
    now_s: float
    capabilities: bytes
    """``policy.snapshot.Capabilities``, JSON."""
    models: dict[str, int]
    """Served name: most prompt tokens."""
    leases: list[tuple[tuple[str, str, str, str], float, float]]
    """(line key, granted, expires) of leases that still live: a new gateway's router takes them over."""


class Snapshot(_Message, frozen=True):
    body: bytes
    """``policy.snapshot.InstanceSnapshot``, JSON. The first one follows ``AgentHello`` at once."""


class Beat(_Message, frozen=True):
    """Alive, with nothing newer to tell."""

    healthy: bool


class CallEnded(_Message, frozen=True):
    """The last word on a submitted call: sent before its answer's last byte."""

    call: int
    outcome: str
    """``completed`` or ``failed``."""
    why: str
    prompt_tokens: int
    """Exact, as are all counts here."""
    device_tokens: int
    host_tokens: int
    recomputed_tokens: int
    output_tokens: int
    admitted_s: float
    """Absolute times; -1 where it never came to that."""
    first_token_s: float
    ended_s: float
    by_sp: bool
    parked: int
    rounds_waited: int


class RoundClosed(_Message, frozen=True):
    body: bytes
    """``policy.instance.RoundSummary``, JSON."""


class Switched(_Message, frozen=True):
    """One logical switch or open: the phases of its slowest rank (SPEC §5.4)."""

    source: str | None
    target: str
    started_s: float
    phases_s: tuple[float, float, float, float, float]
    path: str
    coverage: float
    dirty: float
    d2d_bytes: int
    h2d_bytes: int
    staging_bytes_per_s: float = 0.0
    """At which a rank staged the target or another before; 0: nothing was."""


class Phase(_Message, frozen=True):
    """A phase of a slot is over, for timelines."""

    name: str
    model: str
    started_s: float
    ended_s: float


class Decision(_Message, frozen=True):
    """One line of the decision log, while recording."""

    line: bytes


FromAgent = AgentHello | Snapshot | Beat | CallEnded | RoundClosed | Switched | Phase | Decision


class Lease(_Message, frozen=True):
    """A return of this line is reserved here until ``expires_s``, or no more (None).

    Every ``CallEnded`` of a completed call is answered by one for its line at once, None where nothing is reserved: only then does
    the slot scheduler hear that the call has ended, so that a slot does not close in the face of a reserved return.
    """

    key: tuple[str, str, str, str]
    expires_s: float | None


class Forget(_Message, frozen=True):
    """The line is of no interest any more."""

    key: tuple[str, str, str, str]


class Void(_Message, frozen=True):
    """Submission ``seq`` will not arrive."""

    seq: int


class Open(_Message, frozen=True):
    """An administrator wants the model's engine up and active, as soon as no call runs on the instance."""

    model: str


class Close(_Message, frozen=True):
    """An administrator wants the model's engine stopped, as soon as its last call has ended. No new ones are placed."""

    model: str


class Tune(_Message, frozen=True):
    """Go on by other knobs, from the scheduler's next step on; said again on every link of a gateway that has said it."""

    knobs: bytes
    """``policy.knobs.Knobs``, JSON."""


class Reset(_Message, frozen=True):
    """Begin anew with this policy, once idle: a fresh scheduler, empty caches, recording from the first step on if ``record``.

    Answered by ``AgentHello`` and ``Snapshot``.
    """

    knobs: bytes
    """``policy.knobs.Knobs``, JSON."""
    session_prefill: bool
    record: bool


FromGateway = Lease | Forget | Void | Open | Close | Tune | Reset
