"""Text of a call in segments, piece by piece: nothing twice, nothing taken back, nothing of a stop string, however segments are cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from talaria.gpu import compat
from talaria.gpu.hooks.call import Call
from talaria.gpu.protocol import engine

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_PIECES = [b"a", b"b", b"ab", b"ba ", " é".encode()[:2], b"\xa9", b"\xf0\x9f", b"\x99\x82", b"\xff"]
_pieces = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=24)


class _Recorder:
    """Where the call lives."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.spawned = 0

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def forget(self, call: Call) -> None:
        pass

    def spawn(self, work: Any) -> None:
        self.spawned += 1
        work.close()


def _chunks(tokens: list[bytes], start: int, end: int, stops: list[str]) -> Iterator[tuple[int, str]]:
    """(tokens so far, new text) as SGLang's detokenizer tells them of a segment that continues after ``start`` tokens."""
    told = ""
    for size in range(start + 1, end + 1):
        text = b"".join(tokens[:size]).decode(errors="replace")
        if size < end:
            if any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop) + 1)):
                continue
            text = text.rstrip(_BROKEN)
        else:
            text = _cut(text, stops) if end == len(tokens) else text
        yield size, text[len(told) :]
        told = text if len(text) > len(told) else told


def _cut(text: str, stops: list[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _up_to_stop(tokens: list[bytes], stops: list[str]) -> tuple[list[bytes], bool]:
    """The tokens that a generation has before it stops."""
    for size in range(1, len(tokens) + 1):
        text = b"".join(tokens[:size]).decode(errors="replace")
        if any(stop in text for stop in stops):
            return tokens[:size], True
    return tokens, False


def _batch(size: int, done: int, text: str, finish: dict[str, Any] | None) -> Any:
    return SimpleNamespace(
        output_ids=[array("q", range(done, size))], output_strs=[text], finished_reasons=[finish], cached_tokens=[done],
        cached_tokens_details=None, weight_versions=None,
    )  # fmt: skip


@settings(max_examples=400, deadline=None)
@example([b" \xc3", b"\xa9", b"a"], [1], [])
@given(_pieces, st.lists(st.integers(1, 24), max_size=5), st.sampled_from([[], ["aba"], ["bb", "a é"], ["ab ba"]]))
def test_text_over_any_segments_is_that_of_one(pieces: list[bytes], ends: list[int], stops: list[str]) -> None:
    tokens, stopped = _up_to_stop(pieces, stops)
    whole = _cut(b"".join(tokens).decode(errors="replace"), stops)
    host, state = _Recorder(), SimpleNamespace(dispatched=True)
    request = SimpleNamespace(rid="call", sampling_params=SimpleNamespace(stop_strs=stops, custom_params=None, max_new_tokens=None))
    call = Call(host, None, state, request, len(pieces) if not stopped else len(pieces) + 1)
    told, done = "", 0
    for start, end in pairwise([0, *sorted({end for end in ends if end < len(tokens)}), len(tokens)]):
        call.grant(end - start - (1 if start == 0 else 0))
        for size, delta in _chunks(tokens, start, end, stops):
            stop = {"type": "stop", "matched": stops} if stopped and size == len(tokens) else {"type": "length", "length": end}
            batch = _batch(size, done, delta, stop if size == end else None)
            call.edit(batch, 0)
            done = size
            told += batch.output_strs[0]
            assert whole.startswith(told)
            assert (batch.finished_reasons[0] is not None) == (size == len(tokens))
            assert batch.cached_tokens == [0]
    assert told == whole
    reasons = [message.reason for message in host.sent if isinstance(message, engine.Ended)]
    assert reasons[-1] == "finished" and set(reasons[:-1]) <= {"grant"}


def test_a_prefix_that_does_not_come_back_is_recomputed_however_often_and_nobody_hears_of_it() -> None:
    host, state = _Recorder(), SimpleNamespace(dispatched=True)
    request = SimpleNamespace(rid="call", sampling_params=SimpleNamespace(stop_strs=[], custom_params=None, max_new_tokens=None))
    call = Call(host, None, state, request, 20)
    for segment in range(2):  # between them the engine may have been switched away from: the host offers its prefix again, and fails again
        failed = {"type": "abort", "message": compat.LOAD_FAILED, "status_code": 503}
        call.grant(10 - (segment == 0))
        spawned = host.spawned
        for attempt in range(1, 4):
            state.dispatched = True
            lost = _batch(10 * segment, 10 * segment, "", failed)
            call.edit(lost, 0)
            assert lost.finished_reasons == [None] and not state.dispatched and host.spawned == spawned + attempt
        told = _batch(10 * segment + 10, 10 * segment, "text" * (segment + 1), {"type": "length", "length": 10 * segment + 10})
        call.edit(told, 0)
        assert told.output_strs == ["text"]
    assert [message.reason for message in host.sent if isinstance(message, engine.Ended)] == ["grant", "finished"]
