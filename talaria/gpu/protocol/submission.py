"""A call on its way to an instance: the very JSON of ``policy.codec``, but not by it, which would take twenty times as long."""

from __future__ import annotations

import msgspec

from talaria.policy.calls import Call, LineKey


class _Key(msgspec.Struct):
    LineKey: tuple[str, str, str, str]


class _Fields(msgspec.Struct):
    id: int
    key: _Key
    turn: int
    enqueued_s: float
    prompt_tokens: int
    reusable_tokens: int
    expected_output_tokens: int | None
    continues: tuple[tuple[str, int], ...]
    deadline_s: float | None
    exact: bool


class _Document(msgspec.Struct):
    Call: _Fields


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Document).decode


def write_call(call: Call) -> bytes:
    return _encode(
        _Document(
            _Fields(
                call.id, _Key(call.key), call.turn, call.enqueued_s, call.prompt_tokens, call.reusable_tokens, call.expected_output_tokens,
                call.continues, call.deadline_s, call.exact,
            )
        )
    )  # fmt: skip


def read_call(document: bytes | msgspec.Raw) -> Call:
    """Raises msgspec.DecodeError for what is no call."""
    it = _decode(document).Call
    return Call(
        it.id, LineKey(*it.key.LineKey), it.turn, it.enqueued_s, it.prompt_tokens, it.reusable_tokens, it.expected_output_tokens,
        it.continues, it.deadline_s, it.exact,
    )  # fmt: skip
