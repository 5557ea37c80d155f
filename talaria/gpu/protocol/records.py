"""What a recording of the gateway says, one JSON object a line: everything that a run directory is made of.

``GET /admin/records`` (admin key) answers with a stream of them for as long as its reader stays. ``POST /admin/reset`` with
``record: true`` begins a recording: ``Begin``, then what happens, in order. One that its reader is too slow for ends with
``Broken``. A call's row comes when both its answer and its agent's last word are in; rows say times on the clock of
``protocol.agent.now_s``, which decisions use too.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Record(msgspec.Struct, frozen=True, tag=True, tag_field="record"):
    pass


class Begin(_Record, frozen=True):
    """A fresh policy. The fields are what the header of a decision log holds, as JSON of ``policy.codec``."""

    cluster: str
    now_s: float
    router: str
    router_arguments: dict[str, Any]
    slots_arguments: dict[str, dict[str, Any]]
    """By instance: arguments of its ``SlotScheduler``."""
    models: list[str]
    instances: list[str]


class DecisionLine(_Record, frozen=True):
    """A line of the decision log, of the router or of an instance's slot scheduler, as ``report.declog`` writes it."""

    line: str


class CallRow(_Record, frozen=True):
    """One call, once: completed, shed or failed. ``call`` is the number in the answer's header ``x-talaria-call``."""

    call: int
    tenant: str
    session: str
    line: str
    model: str
    turn: int
    instance: str | None
    """None: never placed."""
    outcome: str
    why: str
    reason: str
    """Of the last placement."""
    is_return: bool
    residency_hit: bool
    opens: bool
    avoidable: bool
    same_instance: bool
    """A return placed on the instance that served the line's previous call."""
    lease_hit: bool
    by_sp: bool
    parked: int
    rounds_waited: int
    enqueued_s: float
    placed_s: float
    """Absolute times; -1 where it never came to that."""
    admitted_s: float
    first_token_s: float
    ended_s: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    recomputed_tokens: int
    output_tokens: int


class RoundRow(_Record, frozen=True):
    instance: str
    round: dict[str, Any]
    """``policy.instance.RoundSummary`` as JSON of ``policy.codec``."""


class SwitchRow(_Record, frozen=True):
    instance: str
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
    """Of a rank, before the switch; 0: nothing was staged."""


class PhaseRow(_Record, frozen=True):
    instance: str
    name: str
    model: str
    started_s: float
    ended_s: float


class Broken(_Record, frozen=True):
    """The recording is over before its reader was: records are missing from here on."""

    why: str


Record = Begin | DecisionLine | CallRow | RoundRow | SwitchRow | PhaseRow | Broken

CALL_HEADER = "x-talaria-call"
"""On an answer of the gateway: the call's number, as in ``CallRow``."""

_encoder = msgspec.json.Encoder()
decode = msgspec.json.Decoder(Record).decode
"""A record from its line. Raises msgspec.DecodeError for what is none."""


def encode(record: Record) -> bytes:
    """A record as its line, the line's end included."""
    return _encoder.encode(record) + b"\n"
