"""Damaged recordings: whatever happens to a file, it imports to a valid trace or is refused in one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.workload.importers import detect, import_trace
from talaria.workload.importers.report import ImportReport
from talaria.workload.trace import TraceFile
from tests.workload.recordings import RECORDINGS

ODD_NUMBERS: list[Any] = [-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, -0.5, 1e300, float("nan")]
ODD_VALUES: list[Any] = [*ODD_NUMBERS, None, True, "", "x", "-1", "12", [], [1], [[]], {}]
ODD_BYTES = [b"\n", b"[", b'"', b"9" * 20]
EXAMPLES = 40


def outcome(folder: Path, content: bytes, name: str) -> str:
    """Imports ``content``, and checks that the trace written is valid or the refusal is one line that names the file."""
    source, target = folder / "recording", folder / "trace.jsonl"
    source.write_bytes(content)
    target.unlink(missing_ok=True)
    try:
        import_trace(source, target, ImportReport(), format_name=name)
    except InputError as refusal:
        assert "\n" not in str(refusal)
        assert "recording" in str(refusal)
        assert not target.exists()
        return "refused"
    assert sum(len(session.calls) for session in TraceFile(target).sessions()) > 0
    return "imported"


@st.composite
def damaged_value(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with one thing somewhere inside it replaced, removed, doubled or moved."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        action = draw(st.sampled_from(["into", "into", "into", "remove", "rename"]))
        rest = {name: item for name, item in value.items() if name != key}
        if action == "remove":
            return rest
        return {**rest, (key + "_" if action == "rename" else key): draw(damaged_value(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(value) - 1))
        action = draw(st.sampled_from(["into", "into", "into", "remove", "double", "reverse"]))
        if action == "into":
            return [*value[:index], draw(damaged_value(value[index])), *value[index + 1 :]]
        if action == "reverse":
            return value[::-1]
        return value[:index] + value[index : index + 1] * (2 if action == "double" else 0) + value[index + 1 :]
    return draw(st.sampled_from(ODD_VALUES))


@pytest.mark.parametrize("name", sorted(RECORDINGS))
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_damaged_values_import_or_are_refused(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    text = RECORDINGS[name]
    if text[0] not in "[{":
        cells = [line.split(",") for line in text.splitlines()]
        at = data.draw(st.integers(0, len(cells) - 1))
        cells[at] = [str(cell) for cell in data.draw(damaged_value(cells[at]).filter(lambda row: isinstance(row, list)))]
        text = "\n".join(",".join(row) for row in cells)
    elif "\n " in text:
        text = json.dumps(data.draw(damaged_value(json.loads(text))), indent=1)
    else:
        lines = [json.loads(line) for line in text.splitlines()]
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = data.draw(damaged_value(lines[at]))
        text = "".join(json.dumps(line) + "\n" for line in lines)
    outcome(tmp_path_factory.mktemp("fuzz"), text.encode(), name)


@pytest.mark.parametrize("name", sorted(RECORDINGS))
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_damaged_bytes_import_or_are_refused(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    content = bytearray(RECORDINGS[name].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=4) | st.sampled_from(ODD_BYTES))
    folder = tmp_path_factory.mktemp("fuzz")
    outcome(folder, bytes(content), name)
    try:
        detect(folder / "recording")
    except InputError as refusal:
        assert "recording" in str(refusal)


def test_the_fuzz_finds_both_outcomes(tmp_path: Path) -> None:
    content = RECORDINGS["weka"].encode()
    assert outcome(tmp_path, content, "weka") == "imported"
    assert outcome(tmp_path, content[:-5], "weka") == "refused"
    assert outcome(tmp_path, b"[" * 100_000, "weka") == "refused"
