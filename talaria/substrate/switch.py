"""A switch between two models of one instance: what its five phases have to do, and what the ranks' records say.

Each TP rank leaves one record; the logical switch is as slow as its slowest rank and as cold as its worst (SPEC §5.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from talaria.substrate.layout import Regions
from talaria.substrate.registry import HostRegistry, Ticket
from talaria.substrate.staging import GatherPlan, StagingMap

PHASES = ("save", "weights", "kv_shell", "graphs", "publish")
"""Save and teardown; open target weights; KV shell; attention backend and graphs; publish references."""
PATHS = ("d2d", "partial", "h2d", "open")
"""From warmest to coldest."""


class SwitchPlan(NamedTuple):
    """What a switch will do on each rank; bytes are per rank.

    Phase 1 waits for ``drain`` and cancels the H2D of ``cancel_staging_of``; phase 2 follows ``gather``, or reads all
    ``h2d_bytes`` from the host where it is None; phase 3 rebuilds the KV shell unless ``reuse_kv_shell``; phase 4
    recaptures unless ``reuse_graphs`` (SPEC §5.1, §5.4). A host that lays every model out once and for all, as the
    simulator does, reuses both at every switch but the open.
    """

    source: str | None
    target: str
    drain: tuple[Ticket, ...]
    cancel_staging_of: str | None
    gather: GatherPlan | None
    d2d_bytes: int
    h2d_bytes: int
    path: str
    reuse_kv_shell: bool
    reuse_graphs: bool


def plan_switch(
    source: str | None,
    target: str,
    weight_bytes: int,
    *,
    registry: HostRegistry,
    staging: StagingMap | None,
    captured: Regions | None,
    regions: Regions,
) -> SwitchPlan:
    """The plan of making ``target`` active, laid out in ``regions``.

    ``captured`` are the regions under which its graphs and KV shell were made; None if it is absent, and then the
    switch is a full open. Only the source's own copies have to be drained (SPEC §5.2, switch barrier).
    """
    staged = staging if staging is not None and staging.target == target else None
    gather = staged.gather_plan() if staged is not None and captured is not None else None
    stale = staging.target if staging is not None and gather is None else None
    return SwitchPlan(
        source=source,
        target=target,
        drain=registry.outstanding(source) if source is not None else (),
        cancel_staging_of=stale,
        gather=gather,
        d2d_bytes=gather.d2d_bytes if gather else 0,
        h2d_bytes=gather.h2d_bytes if gather else weight_bytes,
        path="open" if captured is None else gather.path if gather else "h2d",
        reuse_kv_shell=captured is not None and captured.kv == regions.kv,
        reuse_graphs=captured is not None and regions.reuses_graphs_of(captured),
    )


@dataclass(frozen=True, slots=True)
class SwitchRecord:
    """One rank's switch, or the logical one: seconds of the five phases, path and bytes moved.

    Raises ValueError for an unknown path.
    """

    phases_s: tuple[float, float, float, float, float]
    path: str
    d2d_bytes: int
    h2d_bytes: int

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ValueError(f"path={self.path!r}: allowed {', '.join(PATHS)}")

    @property
    def total_s(self) -> float:
        return sum(self.phases_s)


def merge_ranks(records: Sequence[SwitchRecord]) -> SwitchRecord:
    """The logical switch: phases of the slowest rank (the first of equals), worst path, most bytes of any rank.

    Its total is the maximum over ranks and the sum of its phases. Raises ValueError for no record.
    """
    if not records:
        raise ValueError("a switch leaves one record for each rank, there is none")
    slowest = max(records, key=lambda record: record.total_s)
    return SwitchRecord(
        slowest.phases_s,
        max((record.path for record in records), key=PATHS.index),
        max(record.d2d_bytes for record in records),
        max(record.h2d_bytes for record in records),
    )
