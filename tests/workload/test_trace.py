"""The trace format: what is written comes back, the same bytes for the same sessions, and no broken line passes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.workload.rules import TraceHeader
from talaria.workload.session import Session, TraceCall
from talaria.workload.trace import TraceFile, write_trace

HEADER: dict[str, Any] = {"schema": "talaria.trace/1", "name": "t", "models": {"m": 2}}
SESSION: dict[str, Any] = {
    "session": "s",
    "calls": [
        {"model": "m", "prompt_tokens": 100, "output_tokens": 10},
        {"model": "m", "turn": 1, "prompt_tokens": 150, "output_tokens": 5, "gap_s": 0.5, "waits_for": [0], "reuse_of": 0,
         "reuse_tokens": 110},
    ],
}  # fmt: skip


@st.composite
def sessions_in_order(draw: st.DrawFn) -> list[Session]:
    starts_s = sorted(draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=3)))
    tenants = st.sampled_from(["default", "añ"])
    return [Session(f"s{number}", draw(calls()), draw(tenants), start_s) for number, start_s in enumerate(starts_s)]


@st.composite
def calls(draw: st.DrawFn) -> tuple[TraceCall, ...]:
    made: list[TraceCall] = []
    turns: dict[str, int] = {}
    for index in range(draw(st.integers(1, 5))):
        model = draw(st.sampled_from("ab"))
        line = f"line-{model}"
        earlier = st.integers(0, index - 1)
        reuse_of = draw(st.none() | earlier) if made else None
        prompt = draw(st.integers(1, 500))
        limit = 0 if reuse_of is None else min(prompt, made[reuse_of].prompt_tokens + made[reuse_of].output_tokens)
        made.append(
            TraceCall(
                line, model, turns.get(line, 0), prompt, draw(st.integers(1, 50)), gap_s=draw(st.floats(0, 1e6)),
                waits_for=tuple(sorted(draw(st.sets(earlier)))) if made else (), spawned_by=draw(st.none() | earlier) if made else None,
                reuse_of=reuse_of, reuse_tokens=draw(st.integers(0, limit)),
                blocks=tuple(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=prompt // 16))),
            )
        )  # fmt: skip
        turns[line] = turns.get(line, 0) + 1
    return tuple(made)


def written(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def read(path: Path) -> list[Session]:
    return list(TraceFile(path).sessions())


def changed(call: int, **fields: Any) -> dict[str, Any]:
    """``SESSION`` with fields of one call replaced, or removed if None."""
    copy: dict[str, Any] = json.loads(json.dumps(SESSION))
    copy["calls"][call].update(fields)
    return copy


@given(sessions_in_order(), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, sessions: list[Session], name: str) -> None:
    path = tmp_path_factory.mktemp("trace") / name
    header = write_trace(path, TraceHeader("t", block_tokens=16, block_scope="global", times=True, estimated=("gap_s",)), sessions)
    trace = TraceFile(path)
    assert list(trace.sessions()) == sessions
    assert trace.header == header
    assert sum(header.models.values()) == sum(len(session.calls) for session in sessions)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_the_same_sessions_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    sessions = read(written(tmp_path / "in.jsonl", HEADER, SESSION))
    first, second = tmp_path / "a" / name, tmp_path / "b" / name
    for path in (first, second):
        path.parent.mkdir()
        write_trace(path, TraceHeader("t"), sessions)
    assert first.read_bytes() == second.read_bytes()


def test_a_gz_name_compresses_and_the_content_decides_on_reading(tmp_path: Path) -> None:
    sessions = read(written(tmp_path / "in.jsonl", HEADER, SESSION))
    packed = tmp_path / "t.jsonl.gz"
    write_trace(packed, TraceHeader("t"), sessions)
    assert gzip.decompress(packed.read_bytes()).startswith(b'{"schema":"talaria.trace/1"')
    renamed = packed.rename(tmp_path / "t.jsonl")
    assert read(renamed) == sessions


def test_defaults_are_left_out_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TraceHeader("t"), [Session("s", (TraceCall("main", "m", 0, 7, 3),))])
    line = json.loads(path.read_text().splitlines()[1])
    assert line == {"session": "s", "calls": [{"model": "m", "prompt_tokens": 7, "output_tokens": 3}]}


def test_models_come_by_falling_number_of_calls_then_by_name(tmp_path: Path) -> None:
    sessions = [Session(f"s{number}", (TraceCall("main", model, 0, 1, 1),)) for number, model in enumerate("cbabcd")]
    write_trace(tmp_path / "t.jsonl", TraceHeader("t"), sessions)
    assert TraceFile(tmp_path / "t.jsonl").models() == ("b", "c", "a", "d")


def test_sessions_are_streamed_so_that_a_later_broken_line_does_not_hide_earlier_ones(tmp_path: Path) -> None:
    sessions = TraceFile(written(tmp_path / "t.jsonl", HEADER, SESSION, "{")).sessions()
    assert next(sessions).id == "s"
    with pytest.raises(InputError, match=r"t\.jsonl:3: not JSON"):
        next(sessions)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", HEADER, SESSION)
    before = path.read_bytes()

    def broken() -> Iterator[Session]:
        yield from read(path)
        raise InputError("stop")

    with pytest.raises(InputError, match="stop"):
        write_trace(path, TraceHeader("t"), broken())
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_trace_without_sessions_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no sessions"):
        write_trace(tmp_path / "t.jsonl", TraceHeader("t"), [])


def test_a_session_that_breaks_a_rule_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"session 's' calls\[0\]: turn = 3"):
        write_trace(tmp_path / "t.jsonl", TraceHeader("t"), [Session("s", (TraceCall("main", "m", 3, 1, 1),))])
    with pytest.raises(InputError, match=r"calls\[0\]\.prompt_tokens = 0"):
        write_trace(tmp_path / "t.jsonl", TraceHeader("t"), [Session("s", (TraceCall("main", "m", 0, 0, 1),))])


BROKEN_CALLS: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "prompt_token": (1, {"prompt_token": 3}, "unknown field 'calls[1].prompt_token'", "did you mean 'prompt_tokens'"),
    "negative": (0, {"prompt_tokens": -5}, "calls[0].prompt_tokens = -5", "greater than or equal to 1"),
    "zero output": (0, {"output_tokens": 0}, "calls[0].output_tokens = 0", "greater than or equal to 1"),
    "text": (0, {"output_tokens": "10"}, "calls[0].output_tokens = '10'", "valid integer"),
    "fraction": (0, {"output_tokens": 1.5}, "calls[0].output_tokens = 1.5", "valid integer"),
    "truth": (0, {"output_tokens": True}, "calls[0].output_tokens = True", "valid integer"),
    "negative gap": (1, {"gap_s": -0.1}, "calls[1].gap_s = -0.1", "greater than or equal to 0"),
    "null model": (0, {"model": None}, "calls[0].model = None", "valid string"),
    "waits for itself": (1, {"waits_for": [1]}, "waits_for = 1", "an earlier call, 0 to 0"),
    "reuses a later call": (0, {"reuse_of": 1}, "reuse_of = 1", "nothing on the first call"),
    "spawned by a later call": (0, {"spawned_by": 0}, "spawned_by = 0", "nothing on the first call"),
    "reuse beyond the prompt": (1, {"prompt_tokens": 100}, "reuse_tokens = 110", "0 to 100"),
    "reuse beyond the earlier call": (1, {"reuse_tokens": 111}, "reuse_tokens = 111", "0 to 110"),
    "reuse of nothing": (0, {"reuse_tokens": 1}, "reuse_tokens = 1", "reuse_of is not given"),
    "a turn left out": (1, {"turn": 2}, "turn = 2", "1: turns count from 0"),
    "a line with two models": (1, {"model": "n"}, "model = 'n'", "a line stays on one model"),
    "blocks without a block size": (0, {"blocks": [1]}, "1 blocks", "block_tokens: 0"),
    "a hash beyond 64 bits": (0, {"blocks": [2**63]}, "calls[0].blocks[0]", "less than"),
}


@pytest.mark.parametrize("case", BROKEN_CALLS)
def test_a_broken_call_is_refused_with_file_line_value_and_what_is_allowed(tmp_path: Path, case: str) -> None:
    call, fields, found, allowed = BROKEN_CALLS[case]
    path = written(tmp_path / "t.jsonl", HEADER, changed(call, **fields))
    with pytest.raises(InputError) as refused:
        read(path)
    line = str(refused.value)
    assert line.startswith(f"{path}:2")
    assert found in line
    assert allowed in line
    assert "\n" not in line


BROKEN_LINES: dict[str, tuple[list[Any], int, str]] = {
    "NaN": ([HEADER, json.dumps(changed(1, gap_s=0.5)).replace("0.5", "NaN")], 2, "gap_s = nan"),
    "infinity": ([HEADER, json.dumps(changed(1, gap_s=0.5)).replace("0.5", "Infinity")], 2, "gap_s = inf"),
    "a session twice": ([HEADER, SESSION, SESSION], 3, "'s' appears twice"),
    "no calls": ([HEADER, {"session": "s", "calls": []}], 2, "calls = []"),
    "a start that the header denies": ([HEADER, {**SESSION, "start_s": 1.0}], 2, "the header says times: false"),
    "a start missing": ([{**HEADER, "times": True}, SESSION], 2, "the header says times: true"),
    "starts out of order": (
        [{**HEADER, "times": True}, {**SESSION, "start_s": 2}, {**SESSION, "session": "b", "start_s": 1}], 3, "come in start order",
    ),
    "no header": ([SESSION], 1, "the first line is no header"),
    "another schema": ([{**HEADER, "schema": "talaria.trace/2"}, SESSION], 1, "'talaria.trace/1'"),
    "unknown header field": ([{**HEADER, "block_token": 1}, SESSION], 1, "did you mean 'block_tokens'"),
    "unknown estimate": ([{**HEADER, "estimated": ["gap"]}, SESSION], 1, "'gap_s'"),
    "no models": ([{**HEADER, "models": {}}, SESSION], 1, "models = {}"),
    "a list": ([HEADER, "[1]"], 2, "document is not an object"),
    "two values": ([HEADER, "{} {}"], 2, "not JSON"),
    "a shared prefix beyond the prompt": ([HEADER, {**SESSION, "shared_tokens": 101}], 2, "shared_tokens = 101"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_LINES)
def test_a_broken_line_is_refused_with_file_and_line(tmp_path: Path, case: str) -> None:
    lines, number, found = BROKEN_LINES[case]
    path = written(tmp_path / "t.jsonl", *lines)
    with pytest.raises(InputError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}:{number}")
    assert found in str(refused.value)


def test_a_file_that_was_cut_after_a_whole_line_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", {**HEADER, "models": {"m": 4}}, SESSION)
    with pytest.raises(InputError, match="differ from the header"):
        read(path)


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(json.dumps(line).encode() for line in (HEADER, SESSION)))[:-12])
    with pytest.raises(InputError, match="damaged or truncated gzip"):
        read(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\n  \n", gzip.compress(b"")):
        path = tmp_path / "t.jsonl"
        path.write_bytes(content)
        with pytest.raises(InputError, match="the file is empty"):
            read(path)


def test_bytes_that_are_not_utf8_are_refused_at_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(HEADER).encode() + b'\n{"session": "\xff"}\n')
    with pytest.raises(InputError, match=r"t\.jsonl:2: byte 0xff is not UTF-8"):
        read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            TraceFile(path)


def test_a_trace_cannot_be_written_where_no_folder_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        write_trace(tmp_path / "absent" / "t.jsonl", TraceHeader("t"), [Session("s", (TraceCall("main", "m", 0, 1, 1),))])
