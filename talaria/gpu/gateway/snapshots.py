"""Snapshots off the wire. Thousands of lines stand in one, and few of them differ from the snapshot before."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from talaria.policy.calls import LineKey
from talaria.policy.codec import CODEC
from talaria.policy.snapshot import InstanceSnapshot, LineState


class _Lines(msgspec.Struct):
    map: list[msgspec.Raw]


_NAMES = [item.name for item in fields(InstanceSnapshot)]
_Body = msgspec.defstruct("_Body", [(name, _Lines if name == "lines" else Any) for name in _NAMES])
_Document = msgspec.defstruct("_Document", [("InstanceSnapshot", _Body)])
_decode = msgspec.json.Decoder(_Document).decode
_decode_any = msgspec.json.Decoder().decode


class SnapshotReader:
    """``CODEC.decode`` for the snapshots of one instance, which remembers the lines of the last one by their bytes."""

    def __init__(self) -> None:
        self._lines: dict[bytes, tuple[LineKey, LineState]] = {}

    def read(self, body: bytes) -> InstanceSnapshot:
        """Raises msgspec.DecodeError or CodecError for what is no snapshot."""
        document: Any = _decode(body)
        content = document.InstanceSnapshot
        known, seen = self._lines, {}
        for raw in content.lines.map:
            text = bytes(raw)
            pair = known.get(text)
            seen[text] = CODEC.decode(_decode_any(text)) if pair is None else pair
        self._lines = seen
        values = {name: CODEC.decode(getattr(content, name)) for name in _NAMES if name != "lines"}
        return InstanceSnapshot(**values, lines=dict(seen.values()))
