"""Snapshots onto the wire. Thousands of lines stand in one, and few of them differ from the snapshot before."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import msgspec

from talaria.policy.calls import LineKey
from talaria.policy.codec import CODEC
from talaria.policy.snapshot import InstanceSnapshot, LineState

_NAMES: Final = tuple(item.name for item in fields(InstanceSnapshot) if item.name != "lines")
_encode = msgspec.json.Encoder().encode


class SnapshotWriter:
    """``CODEC.encode`` for the snapshots of one instance, as JSON; it remembers how the lines of the last one were written."""

    def __init__(self) -> None:
        self._lines: dict[LineKey, tuple[LineState, msgspec.Raw]] = {}

    def write(self, snapshot: InstanceSnapshot) -> bytes:
        known, written = self._lines, {}
        for key, state in snapshot.lines.items():
            line = known.get(key)
            if line is None or line[0] is not state:
                line = state, msgspec.Raw(_encode([CODEC.encode(key), CODEC.encode(state)]))
            written[key] = line
        self._lines = written
        content = {name: CODEC.encode(getattr(snapshot, name)) for name in _NAMES}
        content["lines"] = {"map": [raw for _, raw in written.values()]}
        return _encode({"InstanceSnapshot": content})
